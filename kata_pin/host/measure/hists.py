"""What ran on pCPUs by histograms that the kernel makes of its tracepoints: where perf is refused.

They are made in an instance of our own, so nothing of others' tracing changes. An instance outlives
its maker: those of processes that ended are removed first. How long a single slice was and when
cannot be told; a slice that is under way counts up to the last tick.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from kata_pin.errors import HostError, ParseError
from kata_pin.host.files import read_bytes
from kata_pin.host.measure.seen import TasksSeen
from kata_pin.host.measure.tracefs import tracefs
from kata_pin.host.root import HostRoot
from kata_pin.host.topology import online
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.windows import CpuWindow, Measured, Method, RanTask
from kata_pin.wire.kernel.hist import MAX_HIST, Hist, parse_hist

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
    try:
        for name in os.listdir(base):
            found = _INSTANCE.match(name)
            if found and not os.path.exists(f"/proc/{found[1]}"):
                with suppress(OSError):
                    os.rmdir(f"{base}/{name}")
        folder = f"{base}/kata-pin-{os.getpid()}"
        os.mkdir(folder)
    except OSError as error:
        raise HostError("make an instance in", "tracefs", error.errno or 0) from error
    try:
        yield folder
    finally:
        with suppress(OSError):
            os.rmdir(folder)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        hint = "the kernel needs CONFIG_HIST_TRIGGERS, and no lockdown in mode confidentiality"
        what = path.rpartition("/events/")[2]
        raise HostError("set", f"a histogram of {what}", error.errno or 0, hint=hint) from error
