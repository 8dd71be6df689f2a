"""The file of the administrator's overrides: read, watched, and changed by `kata-pin policy`.

New content appears by rename, so it is complete or absent. A lock on the file's folder keeps two
commands apart. What the lines mean: wire/orders.py.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Final

from asyncinotify import Mask

from kata_pin.errors import StateError
from kata_pin.model.settings import CpuClass
from kata_pin.owned_file import read_state
from kata_pin.sources.watches import folder_events
from kata_pin.wire.orders import MAX_BYTES, parse_orders, render_orders

RETRY_S: Final = 10.0  # between tries to watch a folder that does not exist

_WATCHED: Final = Mask.MOVED_TO | Mask.MOVED_FROM | Mask.CLOSE_WRITE | Mask.DELETE | Mask.CREATE

Orders = dict[str, CpuClass]


class OrdersFile:
    """One file of overrides; holds nothing open between calls."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._folder, self._name = os.path.split(path)

    def read(self) -> Orders:
        """Return the overrides, none where the file does not exist.

        Raises StateError for a file that is not root's, is too large, or has a wrong line.
        """
        return read_state(self.path, MAX_BYTES, parse_orders) or {}

    def change(self, change: Callable[[Orders], object]) -> Orders:
        """Let `change` alter the overrides, write them, and return them.

        Raises StateError, also for a file that cannot be read, which is then left as it is.
        """
        try:
            os.makedirs(self._folder, exist_ok=True)
            with _locked(self._folder):
                orders = self.read()
                before = dict(orders)
                change(orders)
                if orders != before:
                    self._write(render_orders(orders))
                return orders
        except OSError as error:
            raise StateError(f"{self.path}: {error.strerror}") from error

    async def watch(self) -> AsyncGenerator[None, None]:
        """Yield once watching, then whenever the file may have changed."""
        events = folder_events(self._folder, _WATCHED, retry_s=RETRY_S, level=logging.INFO)
        async with aclosing(events):
            async for name in events:
                if name in {"", self._name}:
                    yield None

    def _write(self, content: bytes) -> None:
        descriptor, path = tempfile.mkstemp(prefix=f".{self._name}.", dir=self._folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            os.rename(path, self.path)
        except BaseException:
            os.unlink(path)
            raise


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
