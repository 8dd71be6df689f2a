"""Where a process shows what it is, also after its first thread has exited."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Final

# While other threads run, the process lives on, and its first thread is a zombie: /proc/<pid>/exe,
# cmdline, root and fd are those of that thread, which has given them up, and show nothing. Every
# living thread still shows them below /proc/<pid>/task (do_exit in kernel/exit.c).

STAT_BYTES: Final = 4096
"""Room for a stat file of /proc: one record of a page at most."""

MAX_DEAD: Final = 256
"""Dead threads to look at before a living one. Threads other than the first stay in the list only
while a tracer has not waited for them."""

_DEAD: Final = frozenset({b"Z", b"X"})


def folder_of(pid: int, proc: str = "/proc") -> str:
    """Return the folder that shows what a process is: its own where no thread of it lives."""
    return living(pid, proc) or f"{proc}/{pid}"


def executable_of(pid: int, proc: str = "/proc") -> tuple[str, str]:
    """Return the link to what a process executes, and where it leads; raises OSError.

    A first thread that has exited has no such link, so the others are looked at only without it.
    """
    link = f"{proc}/{pid}/exe"
    try:
        return link, os.readlink(link)
    except FileNotFoundError:
        link = f"{folder_of(pid, proc)}/exe"
        return link, os.readlink(link)


def executables(pids: Iterable[int], proc: str = "/proc") -> list[str]:
    """Return where the link of each process leads, as `executable_of`; empty where that fails."""
    found = []
    for pid in pids:
        try:
            found.append(executable_of(pid, proc)[1])
        except OSError:
            found.append("")
    return found


def living(pid: int, proc: str = "/proc") -> str | None:
    """Return the folder of a process, or of a living thread of it if its first one has exited.

    None if it has ended: every thread's state is Z or X (proc_pid_stat(5)).
    """
    own = f"{proc}/{pid}"
    if _lives(own):
        return own
    with suppress(FileNotFoundError, ProcessLookupError), os.scandir(f"{own}/task") as threads:
        paths = (thread.path for thread in islice(threads, MAX_DEAD))
        return next(filter(_lives, paths), None)
    return None


def _lives(folder: str) -> bool:
    try:
        with open(f"{folder}/stat", "rb", buffering=0) as file:
            state = file.read(STAT_BYTES).rpartition(b")")[2].split(maxsplit=1)[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in _DEAD
