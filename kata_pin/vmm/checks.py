"""Checks of what may be a sandbox's VMM or shim, by what the kernel shows of it (D5, D24).

Nothing here can be chosen by the process itself.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache
from typing import Final, NamedTuple

from kata_pin.errors import KataPinError, TaskGone
from kata_pin.model.thread import Process, ThreadRole
from kata_pin.vmm.host_access import HostPaths
from kata_pin.vmm.kinds import VmmKind
from kata_pin.wire.proc import status_field

YOUNG_S: Final = 2.0
"""A fork may exec; until a process is so old, nothing that exec changes is remembered."""

_MAX_BYTES = 8192
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Refused(KataPinError):  # noqa: N818 - a verdict with its reason, collected by find.py
    """A candidate is not the sandbox's VMM."""


class Status(NamedTuple):
    """What is used of /proc/<pid>/status (proc_pid_status(5)).

    `uids` are the real, effective, saved and file system uid, none where they cannot be read;
    `levels` how many pid namespaces the process has a number in, from ours inwards.
    """

    tgid: int
    uids: tuple[int, ...]
    levels: int


def read_status(root: HostPaths, pid: int) -> Status:
    """Return the status of a process or thread; what cannot be read is the tid, none and 1."""
    data = _read(root.proc(pid, "status"))
    tgid = status_field(data, "Tgid") or ""
    uids = (status_field(data, "Uid") or "").split()
    levels = (status_field(data, "NSpid") or "").split()
    return Status(
        int(tgid) if tgid.isdecimal() else pid,
        tuple(int(uid) for uid in uids if uid.isdecimal()),
        max(1, len(levels)),
    )


def is_young(process: Process) -> bool:
    """Whether a process may still be between its fork and its exec."""
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return process.key.starttime / _TICKS > now_s - YOUNG_S


def started_by(process: Process, stamp_ns: int) -> bool:
    """Whether a process had started at a time of CLOCK_BOOTTIME, in ns; 0 is unknown.

    If not, its pid was another's then.
    """
    return not stamp_ns or process.key.starttime <= stamp_ns * _TICKS // 10**9 + 1


def thread_group(root: HostPaths, tid: int) -> int:
    """Return the process that a tid belongs to, the tid itself when that cannot be read.

    Hooks of Dragonball, and poststart hooks of the Go runtime, report a thread of the shim.
    """
    return read_status(root, tid).tgid


def check_namespaces(root: HostPaths, pid: int, status: Status) -> None:
    """Refuse a process of a nested pid or user namespace: shims start VMMs in the host's.

    Who makes a user namespace may mount anything there, so that the path of an executable, and that
    it was deleted, prove nothing. Every process may read another's uid_map.
    """
    if status.levels > 1:
        raise Refused("it runs in its own pid namespace")
    if root.live and _read(root.proc(pid, "uid_map")) != _own_users(root):
        raise Refused("it runs in its own user namespace")


@lru_cache(maxsize=1)
def _own_users(root: HostPaths) -> bytes:
    return _read(root.proc("self", "uid_map"))


def is_roots(root: HostPaths, status: Status) -> bool:
    """Whether a process is root's by every uid: not one that a setuid program started.

    In a captured tree without a status file it counts as root's.
    """
    return all(uid == 0 for uid in status.uids) and (bool(status.uids) or not root.live)


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


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return b""
