"""Which interrupts pCPUs handled, and how long: perf's samples of the kernel's tracepoints.

Each kind has a tracepoint at its beginning and one at its end. What comes between belongs to the
innermost. Interrupts are part of the time of the task that they interrupt.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from fcntl import ioctl
from types import TracebackType
from typing import Final, Self

from kata_pin.broker.perf import attributes, open_event
from kata_pin.errors import HostError, ParseError
from kata_pin.host.files import read_text
from kata_pin.host.measure.ring import ENABLE, Ring
from kata_pin.host.measure.tracefs import event_id, tracefs
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.windows import Interrupt
from kata_pin.wire.kernel.perf_raw import Traced, parse_traced

RING_BYTES: Final = 1024 * 1024

_TRACEPOINT: Final = 2
_DISABLED_WATERMARK: Final = 1 << 0 | 1 << 14
_TIME_RAW: Final = 1 << 2 | 1 << 10
_SET_OUTPUT: Final = 0x2405

HARDWARE, SOFTIRQ, IPI = "hardware", "softirq", "ipi"

SOFTIRQS: Final = (
    *("HI", "TIMER", "NET_TX", "NET_RX", "BLOCK"),
    *("IRQ_POLL", "TASKLET", "SCHED", "HRTIMER", "RCU"),
)
"""Names by number (linux/interrupt.h)."""

_DEVICES: Final = "irq/irq_handler"
_SOFT: Final = "irq/softirq"
_VECTORS: Final = {
    "local_timer": HARDWARE,
    "thermal_apic": HARDWARE,
    "spurious_apic": HARDWARE,
    "error_apic": HARDWARE,
    "x86_platform_ipi": IPI,
    "reschedule": IPI,
    "call_function": IPI,
    "call_function_single": IPI,
}
"""x86's vectors that no device has (arch/x86/include/asm/trace/irq_vectors.h).

Not irq_work: the kernel samples it in no ring, because writing one may cause it.
"""

Key = tuple[str, str, int]
"""Kind, name and number of a device's interrupt (-1: none)."""


@dataclass
class _Sums:
    times: int = 0
    total_ns: int = 0
    longest_ns: int = 0


@dataclass
class Nesting:
    """Adds up beginnings and ends of one pCPU's interrupts."""

    sums: dict[Key, _Sums] = field(default_factory=dict)
    _open: list[tuple[Key, int, int]] = field(default_factory=list)
    """What is under way: since when, and how long others interrupted it."""

    def begin(self, key: Key, time_ns: int) -> None:
        """An interrupt begins."""
        self._open.append((key, time_ns, 0))

    def end(self, key: Key, time_ns: int) -> None:
        """An interrupt ends; one whose beginning was not seen does not count."""
        while self._open:
            found, since, inner = self._open.pop()
            if found != key:
                continue  # its end was not seen
            whole = max(0, time_ns - since)
            net = max(0, whole - inner)
            one = self.sums.setdefault(key, _Sums())
            one.times += 1
            one.total_ns += net
            one.longest_ns = max(one.longest_ns, net)
            if self._open:
                outer, began, others = self._open.pop()
                self._open.append((outer, began, others + whole))
            return

    def forget(self) -> None:
        """Records were lost: what is under way is not known."""
        self._open.clear()


class InterruptRecorder:
    """Records interrupts of some pCPUs until `end`; what cannot be is a problem, never an error."""

    def __init__(self, root: HostRoot, cpus: CpuSet) -> None:
        self._root = root
        self._rings: dict[int, Ring] = {}
        self._nested = {cpu: Nesting() for cpu in cpus}
        self._events: dict[int, tuple[str, bool]] = {}
        self.problem = ""
        self._stack = ExitStack()
        with ExitStack() as opening:
            try:
                self._open(opening, cpus)
                self._stack = opening.pop_all()
            except HostError as error:
                self.problem = error.message
            except OSError as error:
                self.problem = f"perf refuses tracepoints: {error.strerror}"
        if self.problem:
            self._rings.clear()

    def _open(self, opening: ExitStack, cpus: CpuSet) -> None:
        if not cpus:
            raise HostError("record", "interrupts of no pCPU")
        with tracefs(self._root) as tracing:
            self._events = dict(_tracepoints(tracing))
        if not self._events:
            raise HostError("find", "tracepoints of interrupts")
        others: list[int] = []
        for cpu in cpus:
            first: Ring | None = None
            for event in self._events:
                attr = attributes(_TRACEPOINT, event, 1, _TIME_RAW, _DISABLED_WATERMARK)
                fd = open_event(attr, cpu)
                if first is None:
                    first = self._rings[cpu] = Ring(fd, RING_BYTES)
                    opening.callback(first.close)
                else:
                    opening.callback(os.close, fd)
                    ioctl(fd, _SET_OUTPUT, first.fd)
                    others.append(fd)
        for fd in (*others, *(ring.fd for ring in self._rings.values())):
            ioctl(fd, ENABLE, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def drain(self) -> None:
        """Read every ring."""
        for cpu, ring in self._rings.items():
            try:
                found = parse_traced(ring.read())
            except ParseError as error:
                self.problem = error.message
                continue
            if found.lost:
                self.problem = "records of interrupts were lost"
                self._nested[cpu].forget()
            self._add(self._nested[cpu], found.hits)

    def _add(self, nested: Nesting, hits: Iterable[Traced]) -> None:
        for hit in hits:
            known = self._events.get(hit.event)
            if known is not None:
                event, begins = known
                key = _key(event, hit.number)
                (nested.begin if begins else nested.end)(key, hit.time_ns)

    def end(self) -> tuple[tuple[Interrupt, ...] | None, str]:
        """Return what was recorded, or None and why it is not known."""
        self.drain()
        if self.problem:
            return None, self.problem
        return tuple(
            Interrupt(
                *(cpu, kind, self._name(name, irq), irq),
                *(one.times, one.total_ns, one.longest_ns),
            )
            for cpu, nested in self._nested.items()
            for (kind, name, irq), one in nested.sums.items()
        ), ""

    def _name(self, name: str, irq: int) -> str:
        if irq >= 0:
            with suppress(OSError):
                return read_text(self._root.sys("kernel", "irq", irq, "actions")) or name
        return name


def _tracepoints(tracing: str) -> Iterator[tuple[int, tuple[str, bool]]]:
    """Yield the numbers of the tracepoints that this kernel has: event, whether it begins."""
    for event in (_DEVICES, _SOFT, *(f"irq_vectors/{name}" for name in _VECTORS)):
        first, last = (event_id(tracing, f"{event}_{end}") for end in ("entry", "exit"))
        if first is not None and last is not None:
            yield first, (event, True)
            yield last, (event, False)


def _key(event: str, number: int) -> Key:
    if event == _DEVICES:
        return HARDWARE, "device", number
    if event == _SOFT:
        known = 0 <= number < len(SOFTIRQS)
        return SOFTIRQ, SOFTIRQS[number] if known else str(number), -1
    name = event.rpartition("/")[2]
    return _VECTORS.get(name, HARDWARE), name, -1
