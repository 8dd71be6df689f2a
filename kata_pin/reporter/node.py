"""What the reporter asks the node's daemon, over sockets that its group may use.

Requests block, so each runs in a thread; the sockets' own deadlines end it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import Final

from kata_pin.errors import DaemonError, KataPinError, RemoteProtocolError
from kata_pin.model.reports.state import State
from kata_pin.model.reports.watch import WatchDocument
from kata_pin.sources.daemon_metrics import read_metrics
from kata_pin.sources.daemon_socket import DaemonAway, DaemonSilent, ask
from kata_pin.wire import reports

ANSWER_S: Final = 10.0
"""Longest wait for a document: group members are served after hooks and root."""


@dataclass(frozen=True)
class NodeDaemon:
    """The daemon that serves a runtime directory."""

    runtime_dir: str

    async def state(self) -> State:
        """Return the state document; raises KataPinError."""
        data = await self._ask("state")
        return await asyncio.to_thread(reports.decode, data, State)

    async def watch(self) -> WatchDocument | None:
        """Return what was seen of exclusive pCPUs; None where the daemon does not say."""
        try:
            return reports.decode(await self._ask("watch"), WatchDocument)
        except (DaemonAway, DaemonSilent):
            raise
        except DaemonError:  # an older daemon
            return None

    async def is_stuck(self) -> bool:
        """Whether a daemon accepts connections, and does not answer."""
        try:
            await self._ask("ping")
        except DaemonSilent:
            return True
        except KataPinError:  # it is away, or answers something else
            return False
        return False

    async def metrics(self) -> bytes:
        """Return the daemon's metrics; raises DaemonError, RemoteProtocolError."""
        path = os.path.join(self.runtime_dir, "metrics.sock")
        try:
            return await asyncio.to_thread(read_metrics, socket.AF_UNIX, path, f"unix:{path}")
        except OSError as error:
            raise DaemonError(f"no metrics from unix:{path}: {error.strerror}") from error

    async def _ask(self, verb: str) -> bytes:
        path = os.path.join(self.runtime_dir, "status.sock")
        try:
            return await asyncio.to_thread(ask, path, verb, {}, ANSWER_S)
        except ValueError as error:  # a path that is too long for a socket
            raise RemoteProtocolError(f"{path}: {error}") from error
