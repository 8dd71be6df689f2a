"""A thread: its identity, and what the kernel counts of it, which grows from its birth."""

from __future__ import annotations

from typing import NamedTuple


class ThreadKey(NamedTuple):
    """A thread's identity (D5): a bare tid may name another thread a moment later.

    A tuple, because a pass hashes hundreds of them.
    """

    tgid: int
    tid: int
    starttime: int


class TaskRun(NamedTuple):
    """How long a thread ran, how long it was ready but had to wait, and in how many slices.

    Time that it waits is added only when it gets a CPU: while it starves, nothing grows.
    """

    ran_ns: int
    waited_ns: int
    slices: int


class TaskMoves(NamedTuple):
    """How often a thread lost its CPU although it was ready, and was moved to another CPU.

    None: this kernel does not tell.
    """

    preemptions: int | None
    migrations: int | None


class TaskSample(NamedTuple):
    """One thread. None: not read, or not told by this kernel.

    `ready` is whether it runs or waits for a CPU right now (state R).
    """

    run: TaskRun
    moves: TaskMoves | None
    last_cpu: int | None
    ready: bool
