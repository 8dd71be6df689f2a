"""The kernel's trace file system, found where it is mounted or in a mount that nobody else sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kata_pin.broker.libc import libc
from kata_pin.errors import HostError
from kata_pin.host.files import read_text
from kata_pin.host.root import HostRoot

_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
"""Numbers of the calls of fsopen(2) and its like, the same on every machine."""

_CLOEXEC: Final = 1
_CREATE: Final = 6


@contextmanager
def tracefs(root: HostRoot) -> Iterator[str]:
    """Yield the path of a trace file system; raises HostError where there is none.

    A mount of our own is attached nowhere and ends with its descriptor (Linux 5.2, CAP_SYS_ADMIN).
    """
    for path in (root.sys("kernel/tracing"), root.debug("tracing")):
        if os.path.isdir(f"{path}/events"):
            yield path
            return
    try:
        mount = _mount()
    except OSError as error:
        hint = "run as root; the kernel needs CONFIG_FTRACE"
        raise HostError("mount", "tracefs", error.errno or 0, hint=hint) from error
    try:
        yield f"/proc/self/fd/{mount}"
    finally:
        os.close(mount)


def _mount() -> int:
    """Return a descriptor of a new mount."""
    call = libc().call
    context = call("syscall", _FSOPEN, b"tracefs", _CLOEXEC)
    try:
        call("syscall", _FSCONFIG, context, _CREATE, None, None, 0)
        return call("syscall", _FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)


def event_id(tracing: str, event: str) -> int | None:
    """Return the number of a tracepoint such as `irq/softirq_entry`; None where there is none."""
    try:
        return int(read_text(f"{tracing}/events/{event}/id"))
    except (OSError, ValueError):
        return None
