"""Kernel threads that work for the whole node and may be moved.

Facts: include/linux/sched.h (flags of tasks), Documentation/filesystems/proc.rst (task/children).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from kata_pin.errors import KataPinError, ParseError
from kata_pin.host.files import STAT_BYTES, read_bytes
from kata_pin.host.process import read_process
from kata_pin.host.quiet.reading import known, unreadable
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.quiet.node import KernelThread, Unknown
from kata_pin.model.thread import Process
from kata_pin.wire.proc import kernel_worker, status_field

NO_SETAFFINITY: Final = 0x0400_0000
"""PF_NO_SETAFFINITY: the kernel refuses to move this thread."""

KTHREADD: Final = 2

_MOST: Final = 1024 * 1024
"""Longest list of kthreadd's children that is read."""


def processes(root: HostRoot) -> dict[int, Process] | Unknown:
    """Return every process by pid; Unknown where those of others are hidden."""
    try:
        pids = [int(name) for name in os.listdir(root.proc()) if name.isdigit()]
    except OSError as error:
        return unreadable(root.proc(), error)
    found = {one.pid: one for one in _read(root, pids)}
    if 1 not in found:
        return Unknown(f"{root.proc()} hides the processes of others (hidepid)")
    return found


def kernel_threads(root: HostRoot) -> Iterator[KernelThread] | Unknown:
    """Return the threads, each read when it is asked for: there may be thousands.

    kthreadd's own list saves reading every process, where there is one.
    """
    children = known(
        root.proc(KTHREADD, "task", KTHREADD, "children"),
        lambda data: [int(word) for word in data.split()],
        _MOST,
    )
    if not isinstance(children, Unknown):
        return movable(root, _read(root, children))
    every = processes(root)
    return every if isinstance(every, Unknown) else movable(root, every.values())


def movable(root: HostRoot, every: Iterable[Process]) -> Iterator[KernelThread]:
    """Yield those of these processes that are such threads.

    An interrupt's thread follows its interrupt, and KVM's and vhost's belong to a sandbox.
    """
    for one in every:
        if (
            one.ppid == KTHREADD
            and not one.flags & NO_SETAFFINITY
            and not one.comm.startswith("irq/")
            and kernel_worker(one.comm) is None
        ):
            yield from _thread(root, one)


def _read(root: HostRoot, pids: Iterable[int]) -> Iterator[Process]:
    for pid in sorted(pids):
        with suppress(KataPinError, OSError):
            yield read_process(root, pid)


def _thread(root: HostRoot, one: Process) -> Iterator[KernelThread]:
    with suppress(OSError, ParseError):
        status = read_bytes(root.proc(one.pid, "status"), STAT_BYTES)
        allowed = status_field(status, "Cpus_allowed_list")
        if allowed is not None:
            yield KernelThread(one.pid, one.comm, CpuSet.parse(allowed), one.key.starttime)
