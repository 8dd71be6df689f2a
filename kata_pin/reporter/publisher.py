"""The loop: read the daemon, write the node's object on change, report Events on pods."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

from kata_pin.errors import KataPinError
from kata_pin.model.node_placement import Condition, NodeStatus, PodEvent
from kata_pin.policy.node_placement import NOTHING_KNOWN, clip, node_status, pod_events
from kata_pin.reporter.api import ApiRefused, ApiServer, Backoff
from kata_pin.reporter.duties import StartupTaint, Topology
from kata_pin.reporter.node import NodeDaemon
from kata_pin.reporter.series import Series

log = logging.getLogger(__name__)

PERIOD_S: Final = 10.0
"""Time between two looks at the daemon, and shortest time between two writes."""

HEARTBEAT_S: Final = 300.0
"""An object that does not change is written this often, for its `lastAudit`."""

REFUSED_S: Final = 600.0
"""An allocation that was refused this long before our start is not reported any more."""


@dataclass
class Publisher:
    """Shows one node to the cluster; `run` ends when it is cancelled.

    `node` is the node's name, `node_uid` its object's uid, and `pod` the pod of daemon and
    reporter; the last two are empty where they are not known.
    """

    daemon: NodeDaemon
    api: ApiServer
    node: str
    node_uid: str
    pod: str = ""
    period_s: float = PERIOD_S
    taint: StartupTaint | None = None
    topology: Topology | None = None
    problem: str = "the daemon was not asked yet"
    """Why the daemon does not answer; empty: it does."""
    api_problem: str = ""
    """Why the newest request to the API server failed; empty: it did not."""
    requests: Counter[str] = field(default_factory=Counter)
    """Rounds of requests to the API server by outcome: `ok`, an HTTP status, or `no-answer`."""
    status: NodeStatus = NOTHING_KNOWN
    _series: Series = field(init=False)
    _backoff: Backoff = field(default_factory=Backoff)
    _written: NodeStatus | None = None
    _written_at: float = 0.0
    _not_before: float = 0.0

    def __post_init__(self) -> None:
        """Make the memory of Events."""
        self._series = Series(self.api, self.node)

    @property
    def is_ready(self) -> bool:
        """Whether the daemon serves: it checked every sandbox, and the runtime is connected."""
        return any(one.status == "True" for one in self.status.conditions)

    async def run(self) -> None:
        """Look and write until cancelled."""
        since = time.time() - REFUSED_S
        while True:
            events = await self.look(since)
            if time.monotonic() >= self._not_before:
                await self.publish(events)
            await asyncio.sleep(self.period_s)

    async def look(self, since: float = 0.0) -> tuple[PodEvent, ...]:
        """Ask the daemon; return what is to be reported on pods.

        An allocation that was refused before the Unix time `since` is not reported.
        """
        try:
            state = await self.daemon.state()
            watch = await self.daemon.watch()
        except KataPinError as error:
            if error.message != self.problem:
                log.warning("cannot read this node's state: %s", error)
            self.problem = error.message
            away = Condition("Ready", "False", "DaemonAway", clip(error.message), "")
            self.status = replace(self.status, conditions=(self._dated(away),))
            return ()
        if self.problem:
            log.info("kata-pin %s serves this node", state.daemon.version)
        self.problem = ""
        if self.topology is not None:
            self.topology.look(state)
        status = node_status(state, watch)
        self.status = replace(status, conditions=tuple(map(self._dated, status.conditions)))
        return pod_events(state, watch, since=since)

    async def publish(self, events: Sequence[PodEvent] = ()) -> None:
        """Write what is due; a failure of one part is logged and waited out, and stops no other."""
        failure: KataPinError | None = None
        for part in (self._remove_taint, partial(self._write, events), self._write_topology):
            try:
                await part()
            except KataPinError as error:
                failure = failure or error
        if isinstance(failure, ApiRefused):
            self._failed(str(failure.status), failure, failure.after_s)
            return
        if failure is not None:
            self._failed("no-answer", failure)
            return
        if self.api_problem:
            log.info("the API server accepts this node's object again")
        self.api_problem = ""
        self._backoff.succeeded()

    async def _remove_taint(self) -> None:
        if self.taint is not None:
            await self.taint.run(ready=self.is_ready)

    async def _write(self, events: Sequence[PodEvent]) -> None:
        """Write the node's object if it is due, and the Events."""
        if self._is_due():
            status = replace(self.status, daemon_pod=self.pod or None)
            await self.api.apply(self.node, self.node_uid, status)
            self._written, self._written_at = self.status, time.monotonic()
            self.requests["ok"] += 1
        await self._series.report(events)

    async def _write_topology(self) -> None:
        if self.topology is not None:
            await self.topology.run()

    def _is_due(self) -> bool:
        """Whether something changed, or was not written for long; audits alone are no change."""
        if self._written is None or time.monotonic() - self._written_at >= HEARTBEAT_S:
            return True
        return replace(self.status, last_audit=self._written.last_audit) != self._written

    def _failed(self, outcome: str, error: KataPinError, after_s: float = 0.0) -> None:
        wait_s = self._backoff.failed(after_s)
        self._not_before = time.monotonic() + wait_s
        self.requests[outcome] += 1
        if error.message != self.api_problem:
            log.warning(
                "reporting to the cluster failed: %s; trying again in %.0f s", error, wait_s
            )
        self.api_problem = error.message

    def _dated(self, condition: Condition) -> Condition:
        """Return a condition with the time of its last change."""
        for known in self.status.conditions:
            if known.type == condition.type and known.status == condition.status:
                return replace(condition, last_transition_time=known.last_transition_time)
        now = datetime.now(tz=UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return replace(condition, last_transition_time=now)
