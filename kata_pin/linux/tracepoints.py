"""What the kernel's tracepoints say of pCPUs: interrupts with durations, histograms of tasks."""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from fcntl import ioctl
from typing import Final, NamedTuple, Self

from kata_pin.base.counters import CpuWindow, Measured, MeasuredInterrupt, RanTask
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import HostError, ParseError
from kata_pin.base.values import Method, TracedKind
from kata_pin.linux.files import HostRoot, host_errors, read_bytes, read_text
from kata_pin.linux.interrupts import is_managed
from kata_pin.linux.kernel_text import check_size, clipped
from kata_pin.linux.perf import ENABLE, Ring
from kata_pin.linux.switches import TasksSeen
from kata_pin.linux.topology import online
from kata_pin.rights.broker.libc import attributes, libc, open_event

# The kernel's trace file system, found where it is mounted or in a mount that nobody else sees.

_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
"""Numbers of the calls of fsopen(2) and its like, the same on every machine."""

_CLOEXEC: Final = 1
_CREATE: Final = 6


@contextmanager
def tracefs(root: HostRoot) -> Iterator[str]:
    """Yield the path of a trace file system; raises HostError where there is none.

    A mount of our own is attached nowhere and ends with its descriptor (Linux 5.2, CAP_SYS_ADMIN).
    """
    for path in (root.sys("kernel/tracing"), root.debug("tracing")):
        if os.path.isdir(f"{path}/events"):
            yield path
            return
    with host_errors("mount", "tracefs", hint="run as root; the kernel needs CONFIG_FTRACE"):
        mount = _mount()
    try:
        yield f"/proc/self/fd/{mount}"
    finally:
        os.close(mount)


def _mount() -> int:
    """Return a descriptor of a new mount."""
    call = libc().call
    context = call("syscall", _FSOPEN, b"tracefs", _CLOEXEC)
    try:
        call("syscall", _FSCONFIG, context, _CREATE, None, None, 0)
        return call("syscall", _FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)


def event_id(tracing: str, event: str) -> int | None:
    """Return the number of a tracepoint such as `irq/softirq_entry`; None where there is none."""
    try:
        return int(read_text(f"{tracing}/events/{event}/id"))
    except (OSError, ValueError):
        return None


# Samples of tracepoints in perf's rings: time, which tracepoint, and its first number.
#
# The events have the fields TIME and RAW (linux/perf_event.h); every tracepoint's record begins
# with its own number, two bytes of flags and the thread, then come its fields, of which the first
# is an `int` here.

_HEADER: Final = struct.Struct("=IHH")
_SAMPLE: Final = struct.Struct("=QIH2xii")  # time, bytes that follow, tracepoint, tid, first field
_LOST: Final = struct.Struct("=QQ")
_TYPE_LOST: Final = 2
_TYPE_THROTTLE: Final = 5
_TYPE_SAMPLE: Final = 9


class Traced(NamedTuple):
    """One hit of a tracepoint: its first field, and the thread that ran."""

    time_ns: int
    event: int
    number: int
    tid: int


class TracedRecords(NamedTuple):
    """What a piece of a ring says; `lost` counts what had no room or was too often."""

    hits: tuple[Traced, ...]
    lost: int


def parse_traced(data: bytes) -> TracedRecords:
    """Read whole records; raises ParseError where one is cut off."""
    hits, lost, at = [], 0, 0
    while at < len(data):
        if len(data) - at < _HEADER.size:
            raise ParseError("a record's header is cut off", source="perf ring")
        kind, _, size = _HEADER.unpack_from(data, at)
        body = at + _HEADER.size
        if size < _HEADER.size or size > len(data) - at:
            raise ParseError(f"a record of {size} bytes", source="perf ring")
        if kind == _TYPE_SAMPLE:
            if size < _HEADER.size + _SAMPLE.size:
                raise ParseError(f"a sample of {size} bytes", source="perf ring")
            time_ns, _, event, tid, number = _SAMPLE.unpack_from(data, body)
            hits.append(Traced(time_ns, event, number, tid))
        elif kind == _TYPE_LOST:
            if size < _HEADER.size + _LOST.size:
                raise ParseError(f"a loss of {size} bytes", source="perf ring")
            lost += _LOST.unpack_from(data, body)[1]
        elif kind == _TYPE_THROTTLE:
            lost += 1
        at += size
    return TracedRecords(tuple(hits), lost)


# Which interrupts pCPUs handled, and how long: perf's samples of the kernel's tracepoints.
#
# Each kind has a tracepoint at its beginning and one at its end. What comes between belongs to the
# innermost. Interrupts are part of the time of the task that they interrupt.

RING_BYTES: Final = 1024 * 1024

_TRACEPOINT: Final = 2
_DISABLED_WATERMARK: Final = 1 << 0 | 1 << 14
_TIME_RAW: Final = 1 << 2 | 1 << 10
_SET_OUTPUT: Final = 0x2405

HARDWARE: Final = "hardware"
SOFTIRQ: Final = "softirq"
IPI: Final = "ipi"

SOFTIRQS: Final = (
    *("HI", "TIMER", "NET_TX", "NET_RX", "BLOCK"),
    *("IRQ_POLL", "TASKLET", "SCHED", "HRTIMER", "RCU"),
)
"""Names by number (linux/interrupt.h)."""

_DEVICES: Final = "irq/irq_handler"
_SOFT: Final = "irq/softirq"
_VECTORS: Final[dict[str, TracedKind]] = {
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

Key = tuple[TracedKind, str, int]
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


class TraceRecorder:
    """Records tracepoints of some pCPUs until it is closed.

    What cannot be recorded is a problem, never an error.
    """

    what: str
    """What is recorded, in the plural."""

    def __init__(self, root: HostRoot, cpus: CpuSet) -> None:
        self._root = root
        self._rings: dict[int, Ring] = {}
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
            raise HostError("record", f"{self.what} of no pCPU")
        with tracefs(self._root) as tracing:
            events = self._find(tracing)
        if not events:
            raise HostError("find", f"tracepoints of {self.what}")
        others: list[int] = []
        for cpu in cpus:
            first: Ring | None = None
            for event in events:
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

    def __exit__(self, *_: object) -> None:
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
                self.problem = f"records of {self.what} were lost"
                self._forget(cpu)
            self._add(cpu, found.hits)

    def _find(self, tracing: str) -> Collection[int]:
        """Return the numbers of the tracepoints to record."""
        raise NotImplementedError

    def _forget(self, cpu: int) -> None:
        """Forget what is under way on a pCPU: records were lost."""
        raise NotImplementedError

    def _add(self, cpu: int, hits: Iterable[Traced]) -> None:
        """Add what was recorded on a pCPU."""
        raise NotImplementedError


class InterruptRecorder(TraceRecorder):
    """Records interrupts of some pCPUs until `end`."""

    what = "interrupts"

    def __init__(self, root: HostRoot, cpus: CpuSet) -> None:
        self._nested = {cpu: Nesting() for cpu in cpus}
        self._events: dict[int, tuple[str, bool]] = {}
        super().__init__(root, cpus)

    def _find(self, tracing: str) -> Collection[int]:
        self._events = dict(_tracepoints(tracing))
        return self._events

    def _forget(self, cpu: int) -> None:
        self._nested[cpu].forget()

    def _add(self, cpu: int, hits: Iterable[Traced]) -> None:
        nested = self._nested[cpu]
        for hit in hits:
            known = self._events.get(hit.event)
            if known is not None:
                event, begins = known
                key = _key(event, hit.number)
                (nested.begin if begins else nested.end)(key, hit.time_ns)

    def end(self) -> tuple[tuple[MeasuredInterrupt, ...] | None, str]:
        """Return what was recorded, or None and why it is not known."""
        self.drain()
        if self.problem:
            return None, self.problem
        return tuple(
            MeasuredInterrupt(
                *(cpu, kind, self._name(name, irq), irq),
                *(one.times, one.total_ns, one.longest_ns),
                managed=irq >= 0 and is_managed(self._root, irq),
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


# Histograms that the kernel makes of its tracepoints (Documentation/trace/histogram.rst).
#
# One line per entry, such as `{ common_cpu: 2, next_pid: 34 } hitcount: 4  runtime: 12345`, then
# totals. Keys are numbers only: a task's name is its own to choose, and may hold newlines.

MAX_HIST: Final = 8 * 1024 * 1024
"""Most bytes that are read: 64,000 entries."""

_HIST_ENTRY: Final = re.compile(
    rb"\{ (?:common_)?cpu: *([0-9]{1,6}), (?:next_)?pid: *([0-9]{1,10}) *\}"
    rb" hitcount: *([0-9]{1,20})(?: *runtime: *([0-9]{1,20}))?\s*\Z"
)
_DROPPED: Final = re.compile(rb"    Dropped: ([0-9]{1,20})\Z")


class HistogramEntry(NamedTuple):
    """A task on a CPU: how often the event hit, and the sum of run times where that is a value."""

    cpu: int
    tid: int
    hits: int
    ran_ns: int


class Hist(NamedTuple):
    """A histogram; `dropped` counts events for which the table had no room."""

    entries: tuple[HistogramEntry, ...]
    dropped: int


def parse_hist(data: bytes) -> Hist:
    """Read a `hist` file; raises ParseError, also where the totals are missing."""
    check_size(data, MAX_HIST, "hist")
    entries = []
    for line in data.split(b"\n"):
        if line.startswith(b"{"):
            found = _HIST_ENTRY.match(line)
            if found is None:
                raise ParseError("not an entry", source="hist", text=clipped(line))
            entries.append(HistogramEntry(*(int(one or 0) for one in found.groups())))
        elif dropped := _DROPPED.match(line):
            return Hist(tuple(entries), int(dropped[1]))
    raise ParseError("no totals", source="hist")


# What ran on pCPUs by histograms that the kernel makes of its tracepoints: where perf is refused.
#
# They are made in an instance of our own, so nothing of others' tracing changes. An instance
# outlives its maker: those of processes that ended are removed first. How long a single slice was
# and when cannot be told; a slice that is under way counts up to the last tick.

LOOK_S: Final = 0.2
"""How often the tasks that ran are looked at, while they live."""

MOST_TASKS: Final = 8192
"""Entries of a histogram; the kernel counts what has no room."""

_INSTANCE: Final = re.compile(r"kata-pin-([0-9]{1,10})\Z")
_SWITCHES: Final = "sched/sched_switch", "hist:keys=common_cpu,next_pid"
_TIMES: Final = "sched/sched_stat_runtime", "hist:keys=common_cpu,pid:vals=runtime"

Progress = Callable[[float], None]


def record_hists(root: HostRoot, cpus: CpuSet, seconds: float, progress: Progress) -> Measured:
    """Measure some pCPUs for so long; raises HostError where the kernel has no such histograms.

    `progress` is called with the share of the window that has passed.
    """
    began = time.thread_time_ns()
    with ExitStack() as stack:
        folder = stack.enter_context(_instance(stack.enter_context(tracefs(root))))
        where = " || ".join(f"CPU == {cpu}" for cpu in cpus)
        start = time.monotonic_ns()
        for event, trigger in (_SWITCHES, _TIMES):
            _write(f"{folder}/events/{event}/trigger", f"{trigger}:size={MOST_TASKS} if {where}")
        seen = TasksSeen(root)
        while (left := seconds - (time.monotonic_ns() - start) / 1e9) > 0:
            time.sleep(min(LOOK_S, left))
            progress(1 - max(0.0, left - LOOK_S) / seconds)
            _look(folder, seen)
        end = time.monotonic_ns()
        switches, times = _read(folder, _SWITCHES[0]), _read(folder, _TIMES[0])
    dropped = switches.dropped + times.dropped
    problem = f"{dropped} events had no room in the kernel's table" if dropped else ""
    still = online(root)
    windows = {
        cpu: CpuWindow(
            cpu,
            start,
            end,
            _tasks(cpu, switches, times),
            records=sum(one.hits for one in switches.entries if one.cpu == cpu),
            lost=dropped,
            problem=problem or ("" if cpu in still else "it is offline"),
        )
        for cpu in cpus
    }
    ran = {task.tid for window in windows.values() for task in window.tasks}
    spent = time.thread_time_ns() - began
    return Measured(Method.HIST, windows, seen.tasks(ran), reader_ns=spent)


def _tasks(cpu: int, switches: Hist, times: Hist) -> tuple[RanTask, ...]:
    """Return what ran on a pCPU; the idle task is in neither sum."""
    slices = {one.tid: one.hits for one in switches.entries if one.cpu == cpu and one.tid}
    ran = {one.tid: one.ran_ns for one in times.entries if one.cpu == cpu and one.tid}
    return tuple(
        RanTask(tid, slices.get(tid, 0), ran.get(tid, 0), 0) for tid in sorted({*slices, *ran})
    )


def _look(folder: str, seen: TasksSeen) -> None:
    for event, _ in (_SWITCHES, _TIMES):
        seen.note_tids(one.tid for one in _read(folder, event).entries)
    seen.look()


def _read(folder: str, event: str) -> Hist:
    try:
        return parse_hist(read_bytes(f"{folder}/events/{event}/hist", MAX_HIST))
    except (OSError, ParseError) as error:
        raise HostError("read the histogram of", event, getattr(error, "errno", 0)) from error


@contextmanager
def _instance(tracing: str) -> Iterator[str]:
    """Yield the folder of an instance, which is removed in the end; raises HostError."""
    base = f"{tracing}/instances"
    with host_errors("make an instance in", "tracefs"):
        for name in os.listdir(base):
            found = _INSTANCE.match(name)
            if found and not os.path.exists(f"/proc/{found[1]}"):
                with suppress(OSError):
                    os.rmdir(f"{base}/{name}")
        folder = f"{base}/kata-pin-{os.getpid()}"
        os.mkdir(folder)
    try:
        yield folder
    finally:
        with suppress(OSError):
            os.rmdir(folder)


def _write(path: str, text: str) -> None:
    hint = "the kernel needs CONFIG_HIST_TRIGGERS, and no lockdown in mode confidentiality"
    what = f"a histogram of {path.rpartition('/events/')[2]}"
    with host_errors("set", what, hint=hint), open(path, "w", encoding="ascii") as file:
        file.write(text)
