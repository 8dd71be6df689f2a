"""The Container Runtime Interface (CRI), over gRPC on a root-owned unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Final, Protocol

from msgspec import Struct

from kata_pin.base.errors import KataPinError, ParseError, reason_of
from kata_pin.base.json_text import check_id, printable
from kata_pin.base.values import ContainerState, Remedy, here
from kata_pin.linux import sockets
from kata_pin.linux.owned_files import OUR_UID
from kata_pin.peers import proto
from kata_pin.peers.nri.messages import MAX_CONTAINERS
from kata_pin.peers.nri.replies import Cpuset
from kata_pin.peers.ttrpc import encoded, parsed
from kata_pin.rights.calls import DIRECT, Calls

# Source: k8s.io/cri-api, pkg/apis/runtime/v1/api.proto. To containerd and CRI-O, 0 and an empty
# text mean "unchanged", so only what is decided is ever written.

UPDATE_RESOURCES: Final = "/runtime.v1.RuntimeService/UpdateContainerResources"
"""The method, as gRPC names it. Its answer has no field."""

LIST_CONTAINERS: Final = "/runtime.v1.RuntimeService/ListContainers"
"""The method, as gRPC names it. Without a filter its request has no field."""

_STATES: Final = {0: ContainerState.CREATED, 2: ContainerState.STOPPED}
"""By the enum ContainerState; the others are running (1) and unknown (3)."""


def update_resources_request(container_id: str, cpuset: Cpuset) -> bytes:
    """Return an UpdateContainerResourcesRequest for a container's cpuset and limits only."""
    limits = cpuset.limits
    linux = proto.crirequest_pb2.LinuxContainerResources(
        cpuset_cpus=str(cpuset.cpus),
        cpuset_mems=str(cpuset.mems),
        cpu_shares=limits.shares or 0,
        cpu_quota=limits.quota_us or 0,
        cpu_period=limits.period_us or 0,
        memory_limit_in_bytes=limits.memory or 0,
    )
    message = proto.crirequest_pb2.UpdateContainerResourcesRequest(
        container_id=container_id, linux=linux
    )
    return encoded(message)


def parse_containers(data: bytes) -> dict[str, ContainerState]:
    """Return the state of each container of a ListContainersResponse by id; raises ParseError.

    An unknown state is `running`: the container may run. Labels and annotations are not kept.
    """
    message = parsed(proto.crirequest_pb2.ListContainersResponse(), data, "CRI ListContainers")
    if len(message.containers) > MAX_CONTAINERS:
        raise ParseError(f"more than {MAX_CONTAINERS} containers", source="CRI ListContainers")
    return {
        check_id(one.id, source="CRI container"): _STATES.get(one.state, ContainerState.RUNNING)
        for one in message.containers
    }


# Changing a container's cpuset at a time of our own choice: the port, and its errors.
#
# Two implementations: NRI's unsolicited updates (peers/nri/plugin.py), and CRI as the kubelet uses
# it (CriClient).

DEADLINE_S: Final = 5.0
"""Longest a runtime may take for one container: it asks every NRI plugin on the way, 2 s each."""

SLOW: Final = "no answer from the runtime within {:g} s"
"""The text of UpdateRefused after the deadline."""


class RuntimeUnavailable(KataPinError):  # noqa: N818 - an ordinary state
    """The runtime cannot be called now, for no container."""


class UpdateRefused(KataPinError):  # noqa: N818 - says what was refused
    """The runtime did not change this container, or not in time (its VM may hang).

    Calls about other containers may succeed.
    """


class ContainerUnknown(UpdateRefused):
    """The runtime has no such container: it has ended, or belongs to another runtime."""


class Updater(Protocol):
    """Changes cpusets; never call it while the runtime waits for our answer."""

    async def update(self, container_id: str, cpuset: Cpuset) -> None:
        """Change a container's cpuset, within a deadline.

        Raises RuntimeUnavailable or UpdateRefused; the change may still happen after either.
        """


# A library that only takes addresses gets a connected socket, over an address of our own.
#
# It listens on an abstract address that the kernel chooses (unix(7)), for one connection of this
# very process, and passes bytes on in both directions until either end closes.

PIECE: Final = 64 * 1024


@contextlib.asynccontextmanager
async def relayed(end: socket.socket) -> AsyncIterator[str]:
    """Relay to a connected socket within the block; yield the abstract address, without its NUL."""
    with contextlib.ExitStack() as closing:
        closing.enter_context(end)
        listener = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.settimeout(0)
        listener.bind("")
        listener.listen(1)
        address = listener.getsockname()
        task = asyncio.create_task(_relay(listener, end))
        try:
            yield address[1:].decode()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _relay(listener: socket.socket, end: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        ours, _ = await loop.sock_accept(listener)
        if sockets.peer(ours).pid == os.getpid():
            break
        ours.close()
    with ours:
        await asyncio.gather(_pump(ours, end), _pump(end, ours))


async def _pump(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until the source ends, and let the target know."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(source, PIECE):
            await loop.sock_sendall(target, data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


# Calls of gRPC over a root-owned unix socket: a container runtime's, the kubelet's.
#
# The library (grpcio, the extra `kata-pin[cri]`) costs 20 MiB and 150 ms, so a thread loads it with
# the first call. Each call opens its own connection: calls are few, and a server that restarts
# leaves none behind. The socket must belong to root or us.

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


class GrpcSocket(Struct, frozen=True):
    """One server; nothing is kept between calls."""

    path: str
    deadline_s: float = DEADLINE_S
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
        except PermissionError:  # the broker looks at it itself
            return
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


# Changing a container's cpuset through CRI, as the kubelet's CPU manager does, and listing states.
#
# With NRI the runtime reports our own update to us before it makes it, so nothing here may be
# called while the runtime waits for our answer.
#
# A status proves nothing about the runtime: Kata passes on what the agent in the guest answered, so
# a tenant may have chosen it. Only the socket shows whether the runtime is there.


class CriClient(GrpcSocket, frozen=True):
    """Calls one runtime."""

    async def update(self, container_id: str, cpuset: Cpuset) -> None:
        """Change a container's cpuset; see Updater."""
        await self._called(UPDATE_RESOURCES, update_resources_request(container_id, cpuset))

    async def containers(self) -> dict[str, ContainerState]:
        """Return the states of all containers by id; raises as `update`, and ParseError."""
        return parse_containers(await self._called(LIST_CONTAINERS, b""))

    async def _called(self, name: str, request: bytes) -> bytes:
        """Make a call and return its answer."""
        try:
            return await self.call(name, request)
        except SocketUnusable as error:
            raise RuntimeUnavailable(error.message) from error
        except CallRefused as error:
            if error.code == "NOT_FOUND":
                text = f"the runtime does not know the container: {error.message}"
                raise ContainerUnknown(text) from error
            slow = error.code == "DEADLINE_EXCEEDED"
            raise UpdateRefused(SLOW.format(self.deadline_s) if slow else error.message) from error
