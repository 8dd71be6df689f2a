"""Waiting for a process to exit, without polling and without mistaking it for a later one.

A wait owns one descriptor from its start to its end, however it ends. Out of scope: threads (a tid
needs PIDFD_THREAD of Linux 6.9) and exit codes (only a parent may ask). Facts: pidfd_open(2).
"""

from __future__ import annotations

import asyncio
import os
from errno import ESRCH

from kata_pin.errors import HostError
from kata_pin.host.process import is_alive
from kata_pin.host.root import HostRoot
from kata_pin.model.thread import ProcessKey


async def wait_exit(root: HostRoot, key: ProcessKey) -> None:
    """Return once the process has exited; at once if it has, or if its pid is another's now.

    Raises HostError where the kernel has no pidfd_open (before Linux 5.3) or refuses one.
    """
    try:
        fd = os.pidfd_open(key.pid)
    except OSError as error:
        if error.errno == ESRCH:
            return
        raise HostError("watch", f"process {key.pid}", error.errno or 0) from error
    try:
        # The descriptor came first: if the process is ours now, the descriptor is its.
        if is_alive(root, key):
            loop, exited = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(fd, exited.set)
            try:
                await exited.wait()
            finally:
                loop.remove_reader(fd)
    finally:
        os.close(fd)
