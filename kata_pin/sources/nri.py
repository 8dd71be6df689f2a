"""The NRI plugin: what containerd or CRI-O tells of pods and containers as it happens.

    plugin = NriPlugin(listener, socket_path=..., name="kata-pin", index="95", wanted=True)
    await plugin.run()           # until cancelled

It observes and nothing else unless it is given a Decider: every answer is empty, so it can neither
change a container nor stand against another plugin (DESIGN D14). A runtime calls its plugins one
after the other under one lock, for every pod of the node, and closes the connection of one that
takes too long: so the answer is sent before anything else is done. Only StartContainer is answered
when the pins stand, or after a fifth of the runtime's timeout, because the workload runs next.

A Decider is asked before the answer, and what it says is the answer; it must be quick. Its own
trouble is never a container's: an unexpected error is logged and answered with nothing. With one,
containers can also be updated unasked, where the runtime is known to stand it: never while it waits
for an answer of ours, one container a call.

The connection is made again whenever it is lost, for ever; then Synchronize tells everything anew.
So an event that the listener could not take ends the connection: nothing stays lost.
Out of scope: what events mean (daemon), and which pods are Kata's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator
from typing import Final

from kata_pin.errors import KataPinError
from kata_pin.sources import unix_socket
from kata_pin.sources.nri_listener import Decider, Listener
from kata_pin.sources.nri_session import REGISTER_S, NriSession
from kata_pin.sources.updater import (
    DEADLINE_S,
    SLOW,
    ContainerUnknown,
    RuntimeUnavailable,
    UpdateRefused,
    words,
)
from kata_pin.wire.nri.replies import Cpuset, parse_update_response
from kata_pin.wire.ttrpc import Code

log = logging.getLogger(__name__)

CONNECT_S: Final = 5.0
SYNCHRONIZE_S: Final = 600.0  # it waits for every pod operation that is under way
RETRY_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class NriPlugin:
    """Keeps one plugin registered; `wanted` says whether a missing runtime is worth a warning."""

    def __init__(
        self,
        listener: Listener,
        *,
        socket_path: str,
        name: str,
        index: str,
        wanted: bool,
        decider: Decider | None = None,
    ) -> None:
        """Without a `decider` it observes.

        `connected_at` is of CLOCK_MONOTONIC, None while there is no connection; then `problem`.
        """
        self.runtime = ""
        self.connected_at: float | None = None
        self.problem = "not connected yet"
        self._listener = listener
        self._decider = decider
        self.path = socket_path
        self._name = name
        self._index = index
        self._wanted = wanted
        self._tries = 0
        self._trouble = ""
        self._session: NriSession | None = None

    async def run(self) -> None:
        """Connect, serve, and begin anew, until cancelled."""
        while True:
            try:
                await self._serve()
            except (KataPinError, OSError) as error:  # TimeoutError is an OSError
                self._complain(error)
            await asyncio.sleep(RETRY_S[min(self._tries, len(RETRY_S) - 1)])
            self._tries += 1

    @property
    def updates_problem(self) -> str:
        """Why containers cannot be updated unasked now, empty if they can."""
        return "NRI is not connected" if self._session is None else self._session.updates_problem

    async def update(self, container_id: str, cpuset: Cpuset) -> None:
        """Change a container's cpuset unasked; see Updater. Only where `updates_problem` is empty.

        Not from within a Listener or a Decider: it waits until the runtime does not wait for us.
        """
        if self._session is None:
            raise RuntimeUnavailable(f"{self.path}: not connected")
        try:
            response = await self._session.update(container_id, cpuset)
            failed = parse_update_response(response.payload)
        except TimeoutError as error:
            raise UpdateRefused(SLOW.format(DEADLINE_S)) from error
        except (KataPinError, OSError) as error:
            raise RuntimeUnavailable(f"{self.path}: {error}") from error
        if response.code == Code.NOT_FOUND:
            raise ContainerUnknown(f"the runtime does not know it: {words(response.message)}")
        if response.code != Code.OK:
            raise UpdateRefused(words(response.message) or f"status {response.code}")
        if container_id in failed:
            raise UpdateRefused("the runtime could not update it")

    async def _serve(self) -> None:
        """Be a plugin until the connection ends; raises KataPinError or OSError."""
        session = NriSession(self._listener, self._decider)
        loop = asyncio.get_running_loop()
        async with _deadline(CONNECT_S, "connecting"):
            transport, _ = await loop.create_unix_connection(lambda: session, self.path)
        try:
            _check_owner(transport.get_extra_info("socket"))
            async with _deadline(REGISTER_S, "registering"):
                await session.register(self._name, self._index)
            async with _deadline(SYNCHRONIZE_S, "Synchronize"):
                told = await session.synchronized
            log.info("NRI: %s", told)
            self._tries, self._trouble = 0, ""
            self.runtime, self.connected_at, self.problem = session.runtime, time.monotonic(), ""
            self._session = session
            await session.closed
        finally:
            self._session = None
            if self._decider is not None:
                self._decider.ended()
            await session.end()

    def _complain(self, error: Exception) -> None:
        """Say once what is wrong, not at every try."""
        trouble = (error.strerror if isinstance(error, OSError) else None) or str(error)
        absent = isinstance(error, FileNotFoundError | ConnectionRefusedError)
        if trouble == self._trouble:
            level = logging.DEBUG
        elif absent and not self._wanted:
            level = logging.INFO
        else:
            level = logging.WARNING
        self._trouble = trouble
        self.connected_at, self.problem = None, trouble
        log.log(level, "NRI: %s: %s", self.path, trouble)


@contextlib.asynccontextmanager
async def _deadline(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise TimeoutError(f"{what} took longer than {seconds:g} s") from None


def _check_owner(sock: socket.socket) -> None:
    """Raise PermissionError for a runtime that is neither root's nor ours (SO_PEERCRED)."""
    who = unix_socket.peer(sock)
    if not who.trusted:
        raise PermissionError(f"the socket's owner, pid {who.pid}, is of uid {who.uid}")
