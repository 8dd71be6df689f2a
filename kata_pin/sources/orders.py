"""The file of the administrator's orders: read, followed, and changed by `kata-pin policy`.

    orders = OrdersFile("/etc/kata-pin/policies")
    orders.read()                       # raises StateError; the caller keeps what it had
    async for _ in orders.watch(): ...  # it may have changed

A new content appears by rename, so it is whole or not there. Two commands at once are kept apart by
a lock on the file's folder. What the lines mean: kata_pin.wire.orders. Out of scope: which pods
there are.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from asyncinotify import Inotify, Mask

from kata_pin.errors import ParseError, StateError
from kata_pin.model.settings import CpuClass
from kata_pin.owned_file import FileRefused, read_owned
from kata_pin.wire.orders import MAX_BYTES, parse_orders, render_orders

log = logging.getLogger(__name__)

RETRY_S: Final = 10.0  # between tries to watch a folder that is not there

_WATCHED: Final = (
    Mask.MOVED_TO | Mask.MOVED_FROM | Mask.CLOSE_WRITE | Mask.DELETE | Mask.CREATE
    | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
)  # fmt: skip
_LOST: Final = Mask.IGNORED | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT

Orders = dict[str, CpuClass]


class OrdersFile:
    """One file of orders; holds nothing open between calls."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._folder, self._name = os.path.split(path)

    def read(self) -> Orders:
        """Return the orders, none where there is no file.

        Raises StateError for a file that is not root's, too large, or wrong in any line.
        """
        try:
            return parse_orders(read_owned(self.path, MAX_BYTES))
        except FileNotFoundError:
            return {}
        except (FileRefused, ParseError) as error:
            raise StateError(f"{self.path}: {error}") from error
        except OSError as error:
            raise StateError(f"{self.path}: {error.strerror}") from error

    def change(self, change: Callable[[Orders], object]) -> Orders:
        """Let `change` alter the orders, write them, and return them.

        Raises StateError, also for a file that cannot be read: nobody's orders are overwritten.
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
        """Yield whenever the file may have changed: at once, then after each change.

        A folder that is not there is looked for again and again.
        """
        told = False
        while True:
            try:
                with Inotify() as inotify:
                    inotify.add_watch(self._folder, _WATCHED)
                    yield None
                    async for event in inotify:
                        if event.mask & _LOST:
                            break
                        if event.name is None or event.name.name == self._name:
                            yield None
            except OSError as error:
                log.log(
                    logging.DEBUG if told else logging.INFO,
                    "cannot watch %s: %s",
                    self._folder,
                    error.strerror,
                )
                told = True
                await asyncio.sleep(RETRY_S)

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
