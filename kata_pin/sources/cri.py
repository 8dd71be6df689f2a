"""Asking the runtime by CRI to change a container's cpuset, as the kubelet's CPU manager does.

    await CriClient("/run/containerd/containerd.sock").update(container_id, cpuset)

The library (grpcio, the extra `kata-pin[cri]`) costs 20 MiB and 150 ms, so it is loaded in a thread
with the first call, and not at all by who never calls. Each call has a connection of its own: there
are few of them, and none is left behind by a runtime that is restarted. With NRI the runtime tells
us of our own update before it makes it, so a call is never made where it would wait for us.

A status says nothing about the runtime: Kata passes on what the agent in the guest says, so a
tenant may have chosen it. Whether the runtime is there is seen by its socket alone.

The socket must be root's or ours. Lifetime: the daemon's, nothing is kept. Out of scope: what to
send and when (daemon/allocation/push.py).
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
from types import ModuleType
from typing import Final, Protocol

from kata_pin.sources.updater import (
    DEADLINE_S,
    SLOW,
    ContainerUnknown,
    RuntimeUnavailable,
    UpdateRefused,
    words,
)
from kata_pin.wire.kube.cri import UPDATE_RESOURCES, update_resources_request
from kata_pin.wire.nri.replies import Cpuset

LIBRARY: Final = "grpc"
MISSING: Final = "the library grpcio is not installed: pip install 'kata-pin[cri]'"

_OPTIONS: Final = (
    ("grpc.default_authority", "localhost"),  # a path's own is refused by strict servers
    ("grpc.use_local_subchannel_pool", 1),  # no back-off of an earlier connection's
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 64 * 1024),
)


class CriClient:
    """Calls one runtime's socket."""

    def __init__(self, path: str, *, deadline_s: float = DEADLINE_S) -> None:
        self.path = path
        self._deadline_s = deadline_s

    @property
    def problem(self) -> str:
        """Why no call can be made at all, empty if one can."""
        return "" if importlib.util.find_spec(LIBRARY) is not None else MISSING

    async def update(self, container_id: str, cpuset: Cpuset) -> None:
        """Change a container's cpuset; see Updater."""
        _check_owner(self.path)
        grpc = await asyncio.to_thread(_library)
        channel = grpc.insecure_channel(f"unix:{self.path}", options=_OPTIONS)
        try:
            method = channel.unary_unary(UPDATE_RESOURCES)
            request = update_resources_request(container_id, cpuset)
            call = method.future(request, timeout=self._deadline_s)
            await _ended(call)
            self._judge(call.code().name, words(call.details() or ""))
        finally:
            channel.close()

    def _judge(self, code: str, details: str) -> None:
        """Raise what a call's status means."""
        if code == "OK":
            return
        if code == "NOT_FOUND":
            raise ContainerUnknown(f"the runtime does not know it: {details}")
        if code == "DEADLINE_EXCEEDED":
            raise UpdateRefused(SLOW.format(self._deadline_s))
        if code == "UNAVAILABLE" and not _is_served(self.path):
            raise RuntimeUnavailable(f"{self.path}: {code}: {details}")
        raise UpdateRefused(details or code)


def _library() -> ModuleType:
    """Return grpcio; its own log goes nowhere: what matters comes as a status."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        return importlib.import_module(LIBRARY)
    except ImportError as error:
        raise RuntimeUnavailable(MISSING) from error


class _Call(Protocol):
    """What is needed of grpc.Future."""

    def add_done_callback(self, fn: Callable[[object], None], /) -> None: ...
    def cancel(self) -> bool: ...


async def _ended(call: _Call) -> None:
    """Return when a call has ended; it is cancelled if the caller is."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def told(_: object) -> None:  # in a thread of the library's
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle)

    call.add_done_callback(told)
    try:
        await done
    finally:
        call.cancel()


def _is_served(path: str) -> bool:
    """Whether somebody listens on a socket; one whose queue is full is listened on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(0)
        try:
            sock.connect(path)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


def _check_owner(path: str) -> None:
    """Raise RuntimeUnavailable unless a path is a socket that root or we have made."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise RuntimeUnavailable(f"{path}: {error.strerror}") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise RuntimeUnavailable(f"{path}: not a socket")
    if status.st_uid not in {0, os.geteuid()}:
        raise RuntimeUnavailable(f"{path}: the socket is of uid {status.st_uid}")
