"""Setting affinities of threads, with the checks that make it safe (D5, D7).

There is no form of sched_setaffinity that takes a process descriptor, so a tid could change hands
between a look and the call. So Calls.set_affinities checks a thread's identity before and after:

- a thread without a known inode by its stat file, read twice through one descriptor: Linux ties the
  open file to the very task, and reading it fails once that task is gone, even when its number is
  taken again;
- one whose folder's inode is known (tasks.TaskReader) by a listing of the process before the first
  and after the last thread: a thread that has that inode in both was the same all the time. For a
  tid to be used again in between, the kernel would have to give out all other numbers first.

A task that changed is reported, and nothing is undone: it was never ours to judge. Facts:
sched_setaffinity(2); kernel/sched/syscalls.c; measured on 6.1, 6.12 and 6.18.
"""

from __future__ import annotations

from collections.abc import Sequence
from errno import EACCES, EINVAL, EPERM, ESRCH, ESTALE
from typing import Final

from kata_pin.calls import Change, Changed
from kata_pin.errors import HostError
from kata_pin.host.files import read_once
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import TaskReader, as_cpuset, as_numbers
from kata_pin.model.placement import Action, ActionResult, Outcome
from kata_pin.wire.proc import parse_stat

PF_NO_SETAFFINITY: Final = 0x0400_0000
"""Task flag of kernel threads whose affinity user space may not change (sched.h)."""

_OUTCOMES: Final = {
    ESRCH: Outcome.GONE,
    ESTALE: Outcome.REUSED,
    EPERM: Outcome.DENIED,
    EACCES: Outcome.UNVERIFIED,
}


def apply(root: HostRoot, action: Action) -> ActionResult:
    """Set one thread's affinity; see apply_all."""
    return apply_all(root, [action])[0]


def apply_all(
    root: HostRoot, actions: Sequence[Action], reader: TaskReader | None = None
) -> list[ActionResult]:
    """Apply actions in their order; one that fails does not stop the rest.

    - GONE: the thread exited before, or while, it was set (ESRCH).
    - REUSED: the tid is another thread's.
    - REFUSED: no CPU of the target is both online and in its cpuset (EINVAL).
    - FIXED: a kernel thread that cannot be moved (EINVAL with PF_NO_SETAFFINITY).
    - DENIED: not ours to set without CAP_SYS_NICE (EPERM).
    - UNVERIFIED: the broker does not accept the process (EACCES; broker/policy.py).
    - CLIPPED: what is read back is not the target: fewer CPUs, or another writer's choice.
    - DONE: what is read back is the target.

    `reader` knows the inodes of threads that it has read. Raises HostError for an error that
    sched_setaffinity(2) does not list (a damaged system).
    """
    changes = [
        Change(*one.key, reader.inode(one.key) if reader else 0, as_numbers(one.ask or one.target))
        for one in actions
    ]
    done = root.calls.set_affinities(changes, root.proc())
    return [_result(root, action, one) for action, one in zip(actions, done, strict=True)]


def _result(root: HostRoot, action: Action, changed: Changed) -> ActionResult:
    if not changed.errno:
        after = as_cpuset(changed.after)
        return ActionResult(
            action, Outcome.DONE if after == action.target else Outcome.CLIPPED, after
        )
    if changed.errno == EINVAL:
        return ActionResult(action, _invalid(root, action))
    outcome = _OUTCOMES.get(changed.errno)
    if outcome is None:
        raise HostError("set affinity of", f"thread {action.key.tid}", changed.errno)
    return ActionResult(action, outcome)


def _invalid(root: HostRoot, action: Action) -> Outcome:
    """Return what EINVAL means for a thread."""
    tgid, tid, _ = action.key
    try:
        stat = parse_stat(read_once(f"{root.proc()}/{tgid}/task/{tid}/stat"))
    except OSError:
        return Outcome.GONE
    return Outcome.FIXED if stat.flags & PF_NO_SETAFFINITY else Outcome.REFUSED
