"""The registry of a runtime directory: one writer, the daemon or a command without one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Final

from kata_pin.daemon.service.compose import boot_id
from kata_pin.daemon.store.containers import Registry
from kata_pin.errors import DaemonError
from kata_pin.host.root import HOST

_FILE: Final = "registry.db"


@contextlib.contextmanager
def held_registry(runtime_dir: str) -> Iterator[Registry]:
    """Make the directory, hold its lock and open its registry.

    Raises DaemonError when another process holds the lock, StateError or OSError when the directory
    or the file cannot be used.
    """
    os.makedirs(runtime_dir, mode=0o750, exist_ok=True)
    path = os.path.join(runtime_dir, _FILE)
    with (
        locked(runtime_dir),
        contextlib.closing(Registry(path, boot_id=boot_id(HOST))) as registry,
    ):
        yield registry


def registry_copy(runtime_dir: str) -> Registry:
    """Return a copy in memory, for looking without a daemon."""
    return Registry.copy_of(os.path.join(runtime_dir, _FILE), boot_id=boot_id(HOST))


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
