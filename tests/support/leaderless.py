"""Makes the first thread of a process exit, and no other: what a hostile VMM can do (x86-64).

The thread is traced, its registers are set to the system call exit(2), which ends one thread alone,
and it runs on.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import pytest

from tests.support.waiting import wait_for

ATTACH, GETREGS, SETREGS, DETACH = 16, 12, 13, 17
SYS_EXIT = 60
SYSCALL = 2
"""Bytes of the instruction, which a thread that waits in a system call has just behind it."""

REGISTERS = 27
ORIG_RAX, RAX, RDI, RIP = 15, 10, 14, 16
"""Of struct user_regs_struct (sys/user.h)."""

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="sets x86-64's registers")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace(request: int, pid: int, data: object = None) -> None:
    if _libc.ptrace(request, pid, None, data) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace request {request} of {pid}")


def exit_leader(pid: int) -> None:
    """End the first thread of a process, which waits in a system call; return once it is dead."""
    registers = (ctypes.c_ulonglong * REGISTERS)()
    _ptrace(ATTACH, pid)
    os.waitpid(pid, 0x40000000)  # __WALL
    _ptrace(GETREGS, pid, ctypes.byref(registers))
    registers[RIP] -= SYSCALL
    registers[RAX], registers[RDI], registers[ORIG_RAX] = SYS_EXIT, 0, 2**64 - 1
    _ptrace(SETREGS, pid, ctypes.byref(registers))
    _ptrace(DETACH, pid)
    wait_for(lambda: state_of(pid) == "Z", f"the first thread of {pid} to exit")


def state_of(pid: int) -> str:
    """Return the state of a process's first thread."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
