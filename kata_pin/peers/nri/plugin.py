"""The NRI plugin: containerd or CRI-O report pods and containers as things happen.

Without a Decider it only observes: every answer is empty, so it can neither change a container nor
conflict with another plugin (D14). A runtime calls its plugins one after the other under one lock,
for every pod of the node, and disconnects one that takes too long, so the answer goes out before
anything else is done. Only StartContainer is answered once the pins are applied, or after a fifth
of the runtime's timeout, because the workload runs next.

With a Decider, its decision is the answer, so it must be quick. Its faults must not fail a
container: an unexpected error is logged and answered with nothing. It can also send updates that
the runtime did not ask for, where the runtime is known to support that: one container per call, and
never while the runtime waits for our answer.

A lost connection is made again, for ever, and Synchronize then reports everything again. So an
event that the listener could not take ends the connection, and nothing stays lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from kata_pin.base.errors import KataPinError, reason_of
from kata_pin.base.json_text import printable
from kata_pin.linux import sockets
from kata_pin.peers.cri import DEADLINE_S, SLOW, ContainerUnknown, RuntimeUnavailable, UpdateRefused
from kata_pin.peers.nri.replies import Cpuset, parse_update_response
from kata_pin.peers.nri.session import REGISTER_S, Decider, Listener, NriSession
from kata_pin.peers.ttrpc import Code
from kata_pin.rights.calls import DIRECT, Calls

log = logging.getLogger(__name__)

CONNECT_S: Final = 5.0
SYNCHRONIZE_S: Final = 600.0  # it waits for every pod operation that is under way
RETRY_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(eq=False)
class NriPlugin:
    """Keeps one plugin registered.

    `wanted` says whether a missing runtime is worth a warning; without a `decider` it observes.
    `connected_at` is the CLOCK_MONOTONIC time of the connection, None while there is none; then
    `problem` says why.
    """

    listener: Listener
    _: KW_ONLY
    socket_path: str
    name: str
    index: str
    wanted: bool
    decider: Decider | None = None
    calls: Calls = DIRECT
    runtime: str = field(default="", init=False)
    connected_at: float | None = field(default=None, init=False)
    problem: str = field(default="not connected yet", init=False)
    _tries: int = field(default=0, init=False)
    _logged: str = field(default="", init=False)
    _session: NriSession | None = field(default=None, init=False)

    async def run(self) -> None:
        """Connect and serve, again after each loss, until cancelled."""
        while True:
            try:
                await self._serve()
            except (KataPinError, OSError) as error:  # TimeoutError is an OSError
                self._complain(error)
            await asyncio.sleep(RETRY_S[min(self._tries, len(RETRY_S) - 1)])
            self._tries += 1
            # A failed session is in cycles, with all it received; by now its transport is gone.
            gc.collect(1)

    @property
    def updates_problem(self) -> str:
        """Why no unsolicited update can be sent now, empty if one can."""
        return "NRI is not connected" if self._session is None else self._session.updates_problem

    async def update(self, container_id: str, cpuset: Cpuset) -> None:
        """Change a container's cpuset; see Updater. Only while `updates_problem` is empty.

        Not from within a Listener or a Decider: it waits until the runtime does not wait for us.
        """
        if self._session is None:
            raise RuntimeUnavailable(f"{self.socket_path}: not connected")
        try:
            response = await self._session.update(container_id, cpuset)
            failed = parse_update_response(response.payload)
        except TimeoutError as error:
            raise UpdateRefused(SLOW.format(DEADLINE_S)) from error
        except (KataPinError, OSError) as error:
            raise RuntimeUnavailable(f"{self.socket_path}: {reason_of(error)}") from error
        if response.code == Code.NOT_FOUND:
            details = printable(response.message)
            raise ContainerUnknown(f"the runtime does not know the container: {details}")
        if response.code != Code.OK:
            raise UpdateRefused(printable(response.message) or f"status {response.code}")
        if container_id in failed:
            raise UpdateRefused("the runtime could not update the container")

    async def _serve(self) -> None:
        """Serve one connection to its end; raises KataPinError or OSError."""
        session = NriSession(self.listener, self.decider)
        loop = asyncio.get_running_loop()
        async with _deadline(CONNECT_S, "connecting"):
            sock = self.calls.connect(self.socket_path)
            transport, _ = await loop.create_unix_connection(lambda: session, sock=sock)
        try:
            sockets.require_trusted(transport.get_extra_info("socket"))
            async with _deadline(REGISTER_S, "registering"):
                await session.register(self.name, self.index)
            async with _deadline(SYNCHRONIZE_S, "Synchronize"):
                summary = await session.synchronized
            log.info("NRI: %s", summary)
            self._tries, self._logged = 0, ""
            self.runtime, self.connected_at, self.problem = session.runtime, time.monotonic(), ""
            self._session = session
            await session.closed
        finally:
            self._session = None
            if self.decider is not None:
                self.decider.ended()
            await session.end()

    def _complain(self, error: Exception) -> None:
        """Log a problem once, not at every try."""
        problem = reason_of(error)
        absent = isinstance(error, FileNotFoundError | ConnectionRefusedError)
        if problem == self._logged:
            level = logging.DEBUG
        elif absent and not self.wanted:
            level = logging.INFO
        else:
            level = logging.WARNING
        self._logged = problem
        self.connected_at, self.problem = None, problem
        log.log(level, "NRI: %s: %s", self.socket_path, problem)


@contextlib.asynccontextmanager
async def _deadline(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise TimeoutError(f"{what} took longer than {seconds:g} s") from None
