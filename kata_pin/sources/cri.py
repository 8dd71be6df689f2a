"""Changing a container's cpuset through CRI, as the kubelet's CPU manager does, and listing states.

The library (grpcio, the extra `kata-pin[cri]`) costs 20 MiB and 150 ms, so a thread loads it with
the first call. Each call opens its own connection: calls are few, and a runtime that restarts
leaves none behind. With NRI the runtime reports our own update to us before it makes it, so nothing
here may be called while the runtime waits for our answer.

A status proves nothing about the runtime: Kata passes on what the agent in the guest answered, so a
tenant may have chosen it. Only the socket shows whether the runtime is there. It must belong to
root or us.
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
from kata_pin.errors import reason_of
from kata_pin.model.sandbox import ContainerState
from kata_pin.owned_file import OUR_UID
from kata_pin.sources.relay import relayed
from kata_pin.sources.updater import (
    DEADLINE_S,
    SLOW,
    ContainerUnknown,
    RuntimeUnavailable,
    UpdateRefused,
)
from kata_pin.wire.ids import printable
from kata_pin.wire.kube.cri import (
    LIST_CONTAINERS,
    UPDATE_RESOURCES,
    parse_containers,
    update_resources_request,
)
from kata_pin.wire.nri.replies import Cpuset

LIBRARY: Final = "grpc"
MISSING: Final = "the library grpcio is not installed: pip install 'kata-pin[cri]'"

MAX_ANSWER: Final = 16 * 1024 * 1024
"""Longest list of containers: containerd sends no longer message either."""

_OPTIONS: Final = (
    ("grpc.default_authority", "localhost"),  # a path's own is refused by strict servers
    ("grpc.use_local_subchannel_pool", 1),  # no back-off of an earlier connection's
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", MAX_ANSWER),
)


@dataclass(frozen=True)
class CriClient:
    """Calls one runtime; nothing is kept between calls."""

    path: str
    deadline_s: float = DEADLINE_S
    calls: Calls = DIRECT

    @property
    def problem(self) -> str:
        """Why no call can be made at all, empty if calls are possible."""
        return "" if importlib.util.find_spec(LIBRARY) is not None else MISSING

    async def update(self, container_id: str, cpuset: Cpuset) -> None:
        """Change a container's cpuset; see Updater."""
        await self._called(UPDATE_RESOURCES, update_resources_request(container_id, cpuset))

    async def containers(self) -> dict[str, ContainerState]:
        """Return the states of all containers by id; raises as `update`, and ParseError."""
        return parse_containers(await self._called(LIST_CONTAINERS, b""))

    async def _called(self, name: str, request: bytes) -> bytes:
        """Make a call and return its answer."""
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
        """Return a socket connected to the runtime, which may take rights."""
        try:
            return self.calls.connect(self.path)
        except BlockingIOError as error:
            raise UpdateRefused("the runtime accepts no more connections for now") from error
        except OSError as error:
            raise RuntimeUnavailable(f"{self.path}: {reason_of(error)}") from error

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
        """Raise RuntimeUnavailable unless the path is a socket that belongs to root or us."""
        try:
            status = self.calls.stat(self.path)
        except OSError as error:
            raise RuntimeUnavailable(f"{self.path}: {reason_of(error)}") from error
        if not stat.S_ISSOCK(status.mode):
            raise RuntimeUnavailable(f"{self.path}: not a socket")
        if status.uid not in {0, OUR_UID}:
            raise RuntimeUnavailable(
                f"{self.path}: the socket is owned by uid {status.uid}, not by root"
            )

    def _judge(self, code: str, details: str) -> None:
        if code == "OK":
            return
        if code == "NOT_FOUND":
            raise ContainerUnknown(f"the runtime does not know the container: {details}")
        if code == "DEADLINE_EXCEEDED":
            raise UpdateRefused(SLOW.format(self.deadline_s))
        if code == "UNAVAILABLE" and not self._is_served():
            raise RuntimeUnavailable(f"{self.path}: {code}: {details}")
        raise UpdateRefused(details or code)


def _library() -> ModuleType:
    """Return grpcio, with its own log switched off: what matters comes as a status."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        return importlib.import_module(LIBRARY)
    except ImportError as error:
        raise RuntimeUnavailable(MISSING) from error


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
