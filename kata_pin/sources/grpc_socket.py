"""Calls of gRPC over a root-owned unix socket: a container runtime's, the kubelet's.

The library (grpcio, the extra `kata-pin[cri]`) costs 20 MiB and 150 ms, so a thread loads it with
the first call. Each call opens its own connection: calls are few, and a server that restarts leaves
none behind. The socket must belong to root or us.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Final, Protocol

from kata_pin.calls import DIRECT, Calls
from kata_pin.errors import KataPinError, reason_of
from kata_pin.owned_file import OUR_UID
from kata_pin.remedy import Remedy, here
from kata_pin.sources.relay import relayed
from kata_pin.wire.ids import printable

LIBRARY: Final = "grpc"

_INSTALL: Final = Remedy("pip install 'kata-pin[cri]'", "use the image of scripts/image --cri")

MAX_ANSWER: Final = 16 * 1024 * 1024
"""Longest answer: containerd sends no longer message either."""

_OPTIONS: Final = (
    ("grpc.default_authority", "localhost"),  # a path's own is refused by strict servers
    ("grpc.use_local_subchannel_pool", 1),  # no back-off of an earlier connection's
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", MAX_ANSWER),
)


class SocketUnusable(KataPinError):  # noqa: N818 - an ordinary state
    """No call can be made now: no library, no server, or a socket that is not root's."""


class CallRefused(KataPinError):  # noqa: N818 - says what was refused
    """The server answered with a status, or not in time; `code` is gRPC's name of it."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(details or code)
        self.code = code


@dataclass(frozen=True)
class GrpcSocket:
    """One server; nothing is kept between calls."""

    path: str
    deadline_s: float
    calls: Calls = DIRECT

    @property
    def problem(self) -> str:
        """Why no call can be made at all, empty if calls are possible."""
        return "" if importlib.util.find_spec(LIBRARY) is not None else _missing()

    async def call(self, name: str, request: bytes) -> bytes:
        """Make a call and return its answer; raises SocketUnusable, CallRefused."""
        self._check_owner()
        grpc = await asyncio.to_thread(_library)
        async with relayed(self._connected()) as address:
            channel = grpc.insecure_channel(f"unix-abstract:{address}", options=_OPTIONS)
            try:
                call = channel.unary_unary(name).future(request, timeout=self.deadline_s)
                await _ended(call)
                self._judge(call.code().name, printable(call.details() or ""))
                return bytes(call.result())
            finally:
                channel.close()

    def _connected(self) -> socket.socket:
        """Return a socket connected to the server, which may take rights."""
        try:
            return self.calls.connect(self.path)
        except BlockingIOError as error:
            raise CallRefused("", "the server accepts no more connections for now") from error
        except OSError as error:
            raise SocketUnusable(f"{self.path}: {reason_of(error)}") from error

    def _is_served(self) -> bool:
        """Return whether a process listens on the socket; a full queue counts as yes."""
        try:
            self.calls.connect(self.path).close()
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _check_owner(self) -> None:
        """Raise SocketUnusable unless the path is a socket that belongs to root or us."""
        try:
            status = self.calls.stat(self.path)
        except OSError as error:
            raise SocketUnusable(f"{self.path}: {reason_of(error)}") from error
        if not stat.S_ISSOCK(status.mode):
            raise SocketUnusable(f"{self.path}: not a socket")
        if status.uid not in {0, OUR_UID}:
            raise SocketUnusable(
                f"{self.path}: the socket is owned by uid {status.uid}, not by root"
            )

    def _judge(self, code: str, details: str) -> None:
        if code == "OK":
            return
        if code == "UNAVAILABLE" and not self._is_served():
            raise SocketUnusable(f"{self.path}: {code}: {details}")
        raise CallRefused(code, details)


def _library() -> ModuleType:
    """Return grpcio, with its own log switched off: what matters comes as a status."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        return importlib.import_module(LIBRARY)
    except ImportError as error:
        raise SocketUnusable(_missing()) from error


def _missing() -> str:
    return f"the library grpcio is not installed: {here(_INSTALL)}"


class _Call(Protocol):
    """The part of grpc.Future that is used."""

    def add_done_callback(self, fn: Callable[[object], None], /) -> None: ...
    def cancel(self) -> bool: ...


async def _ended(call: _Call) -> None:
    """Wait until a call has ended; cancelling the wait cancels the call."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def on_done(_: object) -> None:  # in a thread of the library
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle)

    call.add_done_callback(on_done)
    try:
        await done
    finally:
        call.cancel()
