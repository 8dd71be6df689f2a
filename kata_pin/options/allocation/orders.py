"""The file of the administrator's overrides: the CPU class of single pods."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Final

from asyncinotify import Mask

from kata_pin.base.errors import ParseError, StateError
from kata_pin.base.json_text import is_id, is_name
from kata_pin.base.values import CpuClass
from kata_pin.linux.inotify import folder_events
from kata_pin.linux.owned_files import read_state

# > # pod                 class
# > shop/database         exclusive
# > 0c7a4d2be81f          share
#
# A pod is named by `namespace/name`, or by the full id of its sandbox outside Kubernetes. The
# classes are those of CpuClass. One wrong line makes the whole file unusable, because half of the
# overrides is not what the administrator meant.

MAX_BYTES: Final = 1 << 20
MAX_ORDERS: Final = 4096  # most pods that can be named; no node has more

_HEAD: Final = (
    "# Written by `kata-pin policy set`; one line per pod: namespace/name or sandbox id, class.\n"
)


def parse_orders(data: bytes) -> dict[str, CpuClass]:
    """Return the class of each named pod; ParseError names the wrong line."""
    if len(data) > MAX_BYTES:
        raise ParseError(f"larger than {MAX_BYTES} bytes", source="orders")
    try:
        lines = data.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise ParseError("not ASCII", source=f"orders: byte {error.start}") from error
    orders: dict[str, CpuClass] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        pod, cpu_class = _order(words, f"orders: line {number}")
        if pod in orders:
            raise ParseError(
                "second line for the same pod", source=f"orders: line {number}", text=pod
            )
        if len(orders) == MAX_ORDERS:
            raise ParseError(f"more than {MAX_ORDERS} lines", source="orders")
        orders[pod] = cpu_class
    return orders


def render_orders(orders: Mapping[str, CpuClass]) -> bytes:
    """Return the file's content, sorted by pod."""
    width = max((len(pod) for pod in orders), default=0)
    lines = (f"{pod:<{width}}  {orders[pod].value}\n" for pod in sorted(orders))
    return (_HEAD + "".join(lines)).encode("ascii")


def is_pod(text: str) -> bool:
    """Return whether `text` can name a pod: `namespace/name`, or a sandbox id."""
    namespace, slash, name = text.partition("/")
    return is_name(namespace) and is_name(name) if slash else is_id(text)


def _order(words: list[str], source: str) -> tuple[str, CpuClass]:
    if len(words) != 2:
        raise ParseError("expected a pod and a class", source=source, text=" ".join(words))
    pod, word = words
    if not is_pod(pod):
        raise ParseError("neither namespace/name nor a sandbox id", source=source, text=pod)
    try:
        return pod, CpuClass(word)
    except ValueError:
        offered = ", ".join(CpuClass)
        raise ParseError(f"expected one of {offered}", source=source, text=word) from None


# New content appears by rename, so it is complete or absent. A lock on the file's folder keeps two
# commands (`kata-pin policy`) apart.

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
