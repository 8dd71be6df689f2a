"""Recording the task switches of some pCPUs by perf's ring buffers.

    with SwitchRecorder(root, cpus, seconds) as recorder:
        while recorder.left_s > 0:
            recorder.wait()          # or sleep elsewhere for at most DRAIN_S
            recorder.drain()
        measured = recorder.end()

Nothing is left behind in the kernel when this process dies. Tasks are looked at soon after they
ran, because their names are gone with them.
"""

from __future__ import annotations

import select
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

from kata_pin.errors import HostError, ParseError
from kata_pin.host.measure.ring import Ring
from kata_pin.host.measure.seen import MOST_LOOKED_AT, TasksSeen
from kata_pin.host.measure.slices import Slices
from kata_pin.host.root import HostRoot
from kata_pin.host.topology import online
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.windows import CpuWindow, Measured, Method
from kata_pin.wire.kernel.perf import Event, parse_records

DRAIN_S: Final = 0.1
"""How often rings are read: names are kept, and 10,000 switches a second fit in between."""

RING_BYTES: Final = 256 * 1024
"""6,500 records; any user may lock so much for each pCPU (kernel.perf_event_mlock_kb)."""

PARTS: Final = 60
"""Parts of a window whose run times are told apart."""


class _Recorded:
    """A ring of switches; `records` counts those that were read, `torn` says what was not whole.

    `pending`: records may be lost of which the kernel tells with the next one, if there is any.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.records = 0
        self.torn = ""
        self.pending = False

    def events(self) -> tuple[Event, ...]:
        """Return what was recorded since the last call."""
        try:
            found = parse_records(self.ring.read())
        except ParseError as error:
            self.torn = error.message
            return ()
        self.records += found.records
        self.pending = self.ring.full or (self.pending and not found.events)
        return found.events


class SwitchRecorder:
    """Records one window of some pCPUs; see the module."""

    def __init__(
        self, root: HostRoot, cpus: CpuSet, seconds: float, *, ring_bytes: int = RING_BYTES
    ) -> None:
        """Start recording. Raises HostError where the kernel does not allow it at all.

        A single pCPU of which that is not possible, because it is offline, has that as its problem.
        """
        self._root = root
        self._seconds = seconds
        self._rings: dict[int, _Recorded] = {}
        self._problems: dict[int, str] = {}
        self._slices: dict[int, Slices] = {}
        self._seen = TasksSeen(root)
        self._poll = select.poll()
        self._reader_ns = 0
        self._stack = ExitStack()
        with ExitStack() as opening:
            self._open(opening, cpus, ring_bytes)
            self._stack = opening.pop_all()
        self._start = time.monotonic_ns()
        for cpu, one in self._rings.items():
            one.ring.enable()
            length = int(seconds * 1e9)
            self._slices[cpu] = Slices(cpu, time.monotonic_ns(), length, PARTS)

    def _open(self, opening: ExitStack, cpus: CpuSet, ring_bytes: int) -> None:
        refusal: OSError | None = None
        for cpu in cpus:
            try:
                ring = Ring(self._root.calls.switches(cpu), ring_bytes)
            except OSError as error:
                refusal = error
                self._problems[cpu] = f"its switches cannot be recorded: {error.strerror}"
                continue
            opening.callback(ring.close)
            self._rings[cpu] = _Recorded(ring)
            self._poll.register(ring.fd, select.POLLIN)
        if refusal is not None and not self._rings:
            raise refused(f"pCPU{'s' * (len(cpus) > 1)} {cpus}", refusal) from refusal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def left_s(self) -> float:
        """Seconds until the window is as long as it shall be."""
        return self._seconds - (time.monotonic_ns() - self._start) / 1e9

    def wait(self) -> None:
        """Sleep until it is time to drain, or a ring is a quarter full."""
        self._poll.poll(max(0.0, min(DRAIN_S, self.left_s)) * 1000)

    def drain(self, most: int = MOST_LOOKED_AT) -> bool:
        """Read every ring, and look at so many new tasks; return whether there are more."""
        began = time.thread_time_ns()
        for cpu, one in self._rings.items():
            events = one.events()
            self._slices[cpu].take(events)
            self._seen.note(events)
        more = self._seen.look(most)
        self._reader_ns += time.thread_time_ns() - began
        return more

    def end(self) -> Measured:
        """Stop recording, and return what was recorded."""
        ends = {}
        for cpu, one in self._rings.items():
            ends[cpu] = time.monotonic_ns()
            one.ring.disable()
        self.drain()
        still = online(self._root)
        windows = {
            cpu: self._slices[cpu].end(
                ends[cpu], one.records, _problem(one, is_online=cpu in still)
            )
            for cpu, one in self._rings.items()
        }
        now = time.monotonic_ns()
        for cpu, problem in self._problems.items():
            windows[cpu] = CpuWindow(cpu, self._start, now, problem=problem)
        ran = {task.tid for window in windows.values() for task in window.tasks}
        return Measured(
            Method.PERF,
            windows,
            self._seen.tasks(ran),
            parts=PARTS,
            reader_ns=self._reader_ns,
        )


def record_switches(
    root: HostRoot, cpus: CpuSet, seconds: float, *, ring_bytes: int = RING_BYTES
) -> Measured:
    """Record the switches of some pCPUs for so long; raises HostError as SwitchRecorder does."""
    with SwitchRecorder(root, cpus, seconds, ring_bytes=ring_bytes) as recorder:
        while recorder.left_s > 0:
            recorder.wait()
            recorder.drain()
        return recorder.end()


def refused(cpus: str, error: OSError) -> HostError:
    """Return the error of pCPUs whose switches the kernel does not let us record."""
    hint = (
        "needs root, or CAP_PERFMON and kernel.perf_event_paranoid of at most 2, "
        "and a seccomp filter that allows perf_event_open"
    )
    return HostError("open a perf event of", cpus, error.errno or 0, hint=hint)


def _problem(one: _Recorded, *, is_online: bool) -> str:
    """Return why a ring does not have everything, empty where nothing shows."""
    if one.pending:
        return "records were lost at its end"
    return one.torn or ("" if is_online else "it is offline")
