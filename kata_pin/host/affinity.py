"""Setting a thread's affinity, with the checks that make it safe (D5, D7).

There is no form of sched_setaffinity that takes a process descriptor, so a tid could change hands
between a look and the call. So a thread's identity is checked before and after:

- `apply` reads the stat file twice through one descriptor: Linux ties the open file to the very
  task, and reading it fails once that task is gone, even when its number is taken again;
- `apply_all` lists the process before its first and after its last thread, where the caller knows
  the inode of a thread's folder (tasks.TaskReader): a thread that has that inode in both listings
  was the same all the time. For a tid to be used again in between, the kernel would have to give
  out all other numbers first.

A task that changed is reported, and nothing is undone: it was never ours to judge. Facts:
sched_setaffinity(2); kernel/sched/syscalls.c; measured on 6.1, 6.12 and 6.18.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from errno import EINVAL, EPERM
from typing import Final

from kata_pin.errors import HostError, TaskGone
from kata_pin.host.files import STAT_BYTES
from kata_pin.host.process import GONE_ERRNOS
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import TaskReader, as_numbers, get_affinity, list_inodes
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.placement import Action, ActionResult, Outcome
from kata_pin.wire.proc import parse_starttime, parse_stat

PF_NO_SETAFFINITY: Final = 0x0400_0000
"""Task flag of kernel threads whose affinity user space may not change (sched.h)."""


def apply(root: HostRoot, action: Action) -> ActionResult:
    """Set one thread's affinity and say what the kernel made of it.

    - GONE: the thread exited before, or while, it was set (ENOENT, ESRCH).
    - REUSED: the tid is another thread's.
    - REFUSED: no CPU of the target is both online and in its cpuset (EINVAL).
    - FIXED: a kernel thread that cannot be moved (EINVAL with PF_NO_SETAFFINITY).
    - DENIED: not ours to set without CAP_SYS_NICE (EPERM).
    - CLIPPED: what is read back is not the target: fewer CPUs, or another writer's choice.
    - DONE: what is read back is the target.

    Raises HostError for an error that sched_setaffinity(2) does not list (a damaged system).
    """
    tgid, tid, starttime = action.key
    fd, stat = -1, None
    try:
        fd = os.open(f"{root.proc()}/{tgid}/task/{tid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        stat = os.read(fd, STAT_BYTES)
        if parse_starttime(stat) != starttime:
            return ActionResult(action, Outcome.REUSED)
        root.scheduler.set_affinity(tid, action.ask or action.target)
        if parse_starttime(os.pread(fd, STAT_BYTES, 0)) != starttime:
            return ActionResult(action, Outcome.REUSED)
        after = CpuSet(root.scheduler.get_affinity(tid))
    except OSError as error:
        return _failed(action, error, stat)
    finally:
        if fd >= 0:
            os.close(fd)
    return ActionResult(action, Outcome.DONE if after == action.target else Outcome.CLIPPED, after)


def apply_all(
    root: HostRoot, actions: Sequence[Action], reader: TaskReader | None = None
) -> list[ActionResult]:
    """Apply actions in their order; one that fails does not stop the rest.

    `reader` knows the inodes of threads that it has read.
    """
    inodes = [reader.inode(action.key) if reader else 0 for action in actions]
    tgids = {action.key.tgid for action, inode in zip(actions, inodes, strict=True) if inode}
    before = {tgid: list_inodes(root, tgid) for tgid in tgids}
    results: list[ActionResult] = []
    sure: list[tuple[int, int]] = []
    for number, (action, inode) in enumerate(zip(actions, inodes, strict=True)):
        key = action.key
        if inode and before[key.tgid].get(key.tid) == inode:
            sure.append((number, inode))
            results.append(_apply_at_once(root, action))
        else:
            results.append(apply(root, action))
    after = {tgid: list_inodes(root, tgid) for tgid in tgids}
    for number, inode in sure:
        action = actions[number]
        now = after[action.key.tgid].get(action.key.tid)
        if now != inode:
            outcome = Outcome.GONE if now is None else Outcome.REUSED
            results[number] = ActionResult(action, outcome)
    return results


def _apply_at_once(root: HostRoot, action: Action) -> ActionResult:
    """Set the affinity of a thread whose identity was just seen, and will be seen again."""
    tid = action.key.tid
    try:
        root.scheduler.set_affinity(tid, as_numbers(action.ask or action.target))
        after = get_affinity(tid, root)
    except TaskGone:
        return ActionResult(action, Outcome.GONE)
    except OSError:
        return apply(root, action)  # it says what the errno means
    return ActionResult(action, Outcome.DONE if after == action.target else Outcome.CLIPPED, after)


def _failed(action: Action, error: OSError, stat: bytes | None) -> ActionResult:
    """Return what an errno means; `stat` is None when the thread was not even seen."""
    if error.errno in GONE_ERRNOS:
        return ActionResult(action, Outcome.GONE)
    if error.errno == EPERM:
        return ActionResult(action, Outcome.DENIED)
    if error.errno == EINVAL and stat is not None:
        fixed = bool(parse_stat(stat).flags & PF_NO_SETAFFINITY)
        return ActionResult(action, Outcome.FIXED if fixed else Outcome.REFUSED)
    raise HostError("set affinity of", f"thread {action.key.tid}", error.errno or 0) from error
