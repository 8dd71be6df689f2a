"""Checks of a process that may be a sandbox's VMM, by what the kernel shows of it (D5)."""

from __future__ import annotations

import os

from kata_pin.errors import KataPinError, TaskGone
from kata_pin.model.thread import ThreadRole
from kata_pin.vmm.host_access import HostPaths
from kata_pin.vmm.kinds import VmmKind
from kata_pin.wire.proc import status_field

_MAX_BYTES = 8192


class Refused(KataPinError):  # noqa: N818 - a verdict with its reason, collected by find.py
    """A candidate is not the sandbox's VMM."""


def thread_group(root: HostPaths, tid: int) -> int:
    """Return the process that a tid belongs to, the tid itself when that cannot be read.

    Hooks of Dragonball, and poststart hooks of the Go runtime, report a thread of the shim.
    """
    text = status_field(_read(root.proc(tid, "status")), "Tgid")
    return int(text) if text is not None and text.isdecimal() else tid


def check_namespace(root: HostPaths, pid: int) -> None:
    """Refuse a process of a nested pid namespace: shims start VMMs in their own, the host's.

    NSpid has one number per level (proc_pid_status(5)).
    """
    levels = status_field(_read(root.proc(pid, "status")), "NSpid")
    if levels is not None and len(levels.split()) > 1:
        raise Refused("it runs in its own pid namespace")


def check_runs_vm(root: HostPaths, pid: int, kind: VmmKind) -> None:
    """Refuse a shim without vCPU threads: Go's shims have the same command line."""
    try:
        tids = os.listdir(root.proc(pid, "task"))
    except OSError as error:
        raise TaskGone("list threads of", f"process {pid}", error.errno or 0) from error
    names = (_read(root.proc(pid, "task", tid, "comm")).rstrip(b"\n") for tid in tids)
    roles = (kind.role_of(name.decode("utf-8", "backslashreplace"), ()) for name in names)
    if not any(one is not None and one.role is ThreadRole.VCPU for one in roles):
        raise Refused("it is a shim that runs no VM itself")


def owner(root: HostPaths, pid: int) -> int | None:
    """Return the effective uid of a process, None when it is gone."""
    words = (status_field(_read(root.proc(pid, "status")), "Uid") or "").split()
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return b""
