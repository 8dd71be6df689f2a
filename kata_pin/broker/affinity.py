"""Changing threads, and making sure of each one's identity (host/affinity.py says how)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from errno import EINVAL, ESRCH, ESTALE
from typing import Final

from kata_pin.broker.protocol import Change, Changed

STAT_BYTES: Final = 4096  # a stat file of /proc is one record of a page at most

_GONE: Final = (FileNotFoundError, ProcessLookupError)

Set = Callable[[int, Iterable[int]], None]
Get = Callable[[int], Iterable[int]]


def set_affinities(
    changes: Sequence[Change],
    proc: str = "/proc",
    set_one: Set = os.sched_setaffinity,
    get_one: Get = os.sched_getaffinity,
) -> list[Changed]:
    """Set affinities in their order; one that fails does not stop the rest."""
    return change_threads(changes, proc, set_one, get_one)


def change_threads(
    changes: Sequence[Change], proc: str, set_one: Set, get_one: Get
) -> list[Changed]:
    """Call `set_one` for each thread with its CPUs, and `get_one` for what it then has.

    How a thread's identity is made sure of before and after: host/affinity.py.
    """
    tgids = {change.tgid for change in changes if change.inode}
    before = {tgid: _inodes(proc, tgid) for tgid in tgids}
    done: list[Changed] = []
    sure: list[int] = []
    for number, change in enumerate(changes):
        if change.inode and before[change.tgid].get(change.tid) == change.inode:
            sure.append(number)
            done.append(_set(change, set_one, get_one))
        else:
            done.append(_set_checked(change, proc, set_one, get_one))
    after = {tgid: _inodes(proc, tgid) for tgid in tgids}
    for number in sure:
        now = after[changes[number].tgid].get(changes[number].tid)
        if now != changes[number].inode:
            done[number] = Changed(ESRCH if now is None else ESTALE)
    return done


def _set(change: Change, set_one: Set, get_one: Get) -> Changed:
    """Change a thread and read back what it has."""
    try:
        set_one(change.tid, change.cpus)
        return Changed(0, frozenset(get_one(change.tid)))
    except OSError as error:
        return Changed(error.errno or EINVAL)


def _set_checked(change: Change, proc: str, set_one: Set, get_one: Get) -> Changed:
    """Set it between two looks at the thread's stat file, through one descriptor."""
    path, fd = f"{proc}/{change.tgid}/task/{change.tid}/stat", -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if _starttime(fd) != change.starttime:
            return Changed(ESTALE)
        changed = _set(change, set_one, get_one)
        return changed if _starttime(fd) == change.starttime else Changed(ESTALE)
    except OSError as error:
        return Changed(ESRCH if isinstance(error, _GONE) else error.errno or EINVAL)
    finally:
        if fd >= 0:
            os.close(fd)


def _inodes(proc: str, tgid: int) -> dict[int, int]:
    """Return the inode of each thread's folder, by tid; empty without the process."""
    try:
        with os.scandir(f"{proc}/{tgid}/task") as entries:
            return {int(entry.name): entry.inode() for entry in entries}
    except _GONE:
        return {}


def _starttime(fd: int) -> int:
    """Return when a thread started, by its open stat file (proc_pid_stat(5), field 22)."""
    return int(os.pread(fd, STAT_BYTES, 0).rpartition(b")")[2].split()[19])
