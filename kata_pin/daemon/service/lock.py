"""One writer per runtime directory: the daemon, or a command that works without one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from kata_pin.errors import DaemonError


@contextlib.contextmanager
def locked(runtime_dir: str) -> Iterator[None]:
    """Hold the directory's lock: flock(2), so that a killed holder leaves nothing locked.

    Raises DaemonError when another process holds it, OSError when it cannot be created.
    """
    path = os.path.join(runtime_dir, "lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DaemonError(
                f"another kata-pin serves {runtime_dir}", hint="kata-pin show asks it"
            ) from error
        yield
    finally:
        os.close(descriptor)
