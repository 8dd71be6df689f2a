"""Run alone in a pid namespace: pins a tid that another thread has taken over.

`before`: the tid changed hands before apply looked; prints the outcome and whether the new owner
was touched. `during`: it changes hands between the look and the system call. With `all` before the
word, by apply_all, which knows the thread's inode.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import Action
from kata_pin.base.steps import finish
from kata_pin.base.threads import ThreadKey
from kata_pin.linux import tasks
from kata_pin.linux.affinity import apply_all
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.linux.tasks import TaskReader, get_affinity, starttime
from kata_pin.rights.calls import Calls
from tests.support.waiting import wait_for


class Sleeper:
    """A thread that sleeps until it is ended."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.thread = threading.Thread(target=self.gate.wait, daemon=True)
        self.thread.start()
        assert self.thread.native_id is not None
        self.tid: int = self.thread.native_id

    def end(self) -> None:
        """End the thread; its tid is free when this returns."""
        self.gate.set()
        self.thread.join()
        path = f"/proc/self/task/{self.tid}"
        wait_for(lambda: not os.path.exists(path), "the thread to be gone")


def replace(old: Sleeper) -> Sleeper:
    """End a thread and start one with the same tid.

    The kernel frees a number a moment after its thread left /proc, so the first try may miss.
    """
    old.end()
    for _ in range(100):
        with open("/proc/sys/kernel/ns_last_pid", "w", encoding="ascii") as file:
            file.write(str(old.tid - 1))
        new = Sleeper()
        if new.tid == old.tid:
            return new
        new.end()
    raise AssertionError(f"tid {old.tid} was never given out again")


class Swapping(Calls):
    """Calls before whose change of an affinity the tid changes hands."""

    def __init__(self, victim: Sleeper) -> None:
        self.victim = victim

    def set_affinity(self, tid: int, cpus: Iterable[int]) -> None:
        """Replace the thread, then set its successor's affinity."""
        self.victim = replace(self.victim)
        os.sched_setaffinity(tid, cpus)


def main(case: str) -> None:
    """Print what came of it."""
    tasks.NAMED_AFTER_S = -1.0  # type: ignore[misc] # its inode counts at once
    pid, victim, reader = os.getpid(), Sleeper(), TaskReader()
    key = ThreadKey(pid, victim.tid, starttime(HOST, pid, victim.tid))
    finish(reader.read(HOST, pid, CpusetReader(HOST)))
    assert reader.inode(key)
    action = Action(key, CpuSet([min(os.sched_getaffinity(0))]), CpuSet(), "test")

    def pinned(root: HostRoot) -> str:
        if case.startswith("all"):
            return apply_all(root, [action], reader)[0].outcome
        return apply_all(root, [action])[0].outcome

    if case.endswith("during"):
        print(pinned(HostRoot(calls=Swapping(victim))))
        return
    while starttime(HOST, pid, victim.tid) == key.starttime:  # a clock tick is 10 ms
        victim = replace(victim)
    before = get_affinity(victim.tid)
    print(pinned(HOST))
    assert key not in {task.key for task in finish(reader.read(HOST, pid, CpusetReader(HOST)))}
    print("untouched" if get_affinity(victim.tid) == before else "touched")


if __name__ == "__main__":
    main(sys.argv[1])
