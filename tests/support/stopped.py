"""Processes that are stopped before their first instruction: their names and arguments are real.

A program is executed with any arguments, and never gets to read them. What the kernel shows of it
(/proc/PID/exe, cmdline, cgroup, owner) is what it would show of one that runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Sequence

_PTRACE_TRACEME = 0
_PTRACE_DETACH = 17

_libc = ctypes.CDLL(None, use_errno=True)


def start(
    argv: Sequence[str],
    *,
    executable: str = "",
    uid: int | tuple[int, int, int] = 0,
    before: Callable[[], None] | None = None,
) -> int:
    """Return the pid of a child of this thread that is stopped after its execve(2).

    `uid` is what it becomes (real, effective, saved); `before` runs in the child, as root, before
    that. Raises OSError when it cannot be executed. `end` ends it.
    """
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            if before is not None:
                before()
            ids = (uid, uid, uid) if isinstance(uid, int) else uid
            if any(ids):
                os.setgroups([])
                os.setresgid(*ids)
                os.setresuid(*ids)
            os.nice(19)
            _libc.ptrace(_PTRACE_TRACEME, 0, None, None)
            os.execve(executable or argv[0], list(argv), {})
        os._exit(127)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        raise OSError(f"{executable or argv[0]} was not executed: status {status}")
    _libc.ptrace(_PTRACE_DETACH, pid, None, ctypes.c_void_p(signal.SIGSTOP))
    return pid


def end(pids: Sequence[int]) -> None:
    """Kill such processes and wait for them."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
