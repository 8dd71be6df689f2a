"""Processes that run on a CPU of their own choice: intruders and owners for tests of isolation.

    with Busy.started(1, "kp-intruder") as intruder:
        ran_ns = intruder.run(0.3)           # so much CPU time, and what the scheduler counted

The program is one file for an interpreter without packages, so the lab's machines run it too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PROGRAM = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
open("/proc/self/comm", "w").write(sys.argv[2])
if int(sys.argv[3]):
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(int(sys.argv[3])))
def ran():
    return open("/proc/thread-self/schedstat").read().split()[0]
print(os.getpid(), flush=True)
for line in sys.stdin:
    seconds, slice_s = map(float, line.split())
    end = time.thread_time() + seconds
    before = ran()
    while (now := time.thread_time()) < end:
        stop = min(end, now + slice_s)
        while time.thread_time() < stop:
            pass
        if stop < end:
            time.sleep(slice_s)
    time.sleep(0.001)
    print(before, ran(), flush=True)
"""


@dataclass
class Busy:
    """A process that runs when it is told; `tid` is its only thread."""

    process: subprocess.Popen[str]
    tid: int

    @classmethod
    @contextmanager
    def started(cls, cpu: int, comm: str, *, fifo: int = 0) -> Iterator[Busy]:
        """Start one that may run on one CPU only; `fifo` is a real-time priority, 0 for none."""
        command = [sys.executable, "-ISc", PROGRAM, str(cpu), comm, str(fifo)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        ) as process:
            assert process.stdout is not None
            try:
                yield cls(process, int(process.stdout.readline()))
            finally:
                process.kill()

    def begin(self, seconds: float, slice_s: float = 60.0) -> None:
        """Have it use so much CPU time, in slices with rests of the same length."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds} {slice_s}\n")
        self.process.stdin.flush()

    def ended(self) -> int:
        """Wait until it rests again; return the nanoseconds that the scheduler counted."""
        assert self.process.stdout is not None
        before, after = map(int, self.process.stdout.readline().split())
        return after - before

    def run(self, seconds: float, slice_s: float = 60.0) -> int:
        """Have it run, and wait for it."""
        self.begin(seconds, slice_s)
        return self.ended()


def last_cpu() -> int:
    """Return the highest CPU that this process may use."""
    return max(os.sched_getaffinity(0))
