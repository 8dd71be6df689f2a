"""What operators are told of quiet pCPUs: in the log, and as events of the node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from kata_pin.daemon.quiet.status import QuietStatus
from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.host.quiet.services import read_crio, read_tuned
from kata_pin.host.quiet.threads import processes
from kata_pin.host.root import HostRoot
from kata_pin.model.count_noun import count
from kata_pin.model.quiet.node import Unknown
from kata_pin.model.quiet.tunables import Observed, QuietState
from kata_pin.model.reports.history import NodeEventKind
from kata_pin.policy.quiet.writers import Writers, suspects

log = logging.getLogger(__name__)


class QuietNotices:
    """Reports each thing once, until it is gone."""

    def __init__(self, root: HostRoot, events: NodeEvents) -> None:
        self._root = root
        self._events = events
        self._known: frozenset[str] = frozenset()

    def changed(self, before: QuietState, status: QuietStatus) -> None:
        """Report other quiet pCPUs than before, and those that cannot be."""
        state, outcome = status.state, status.outcome
        if (state.quiet, state.full) != (before.quiet, before.full):
            self._events.report(
                NodeEventKind.QUIET_CHANGED,
                "quiet pCPUs: %s, before: %s; %s set, %s restored",
                _named(state),
                _named(before),
                count(outcome.written, "value"),
                count(outcome.given_back, "value"),
                level=logging.INFO,
                cpus=str(state.quiet),
            )
        for one in state.spared:
            if one not in before.spared:
                log.warning("pCPU %d is not quiet: %s", one.cpu, one.reason)

    def problems(self, found: Mapping[str, str]) -> None:
        """Report why something cannot be written, each reason once until it is gone."""
        reasons = frozenset(found.values())
        for what, why in found.items():
            if why not in self._known:
                self._known |= {why}
                self._events.report(NodeEventKind.QUIET_FAILED, "cannot set %s: %s", what, why)
        self._known = reasons

    async def overridden(self, found: Sequence[Observed], irqbalance: Sequence[int]) -> None:
        """Report what another writer set too often, and who that may be."""
        if not found:
            return
        writers = await asyncio.to_thread(self._writers, tuple(irqbalance))
        for seen in found:
            self._events.report(
                NodeEventKind.QUIET_WRITER,
                "%s: another writer set %s again and again; kata-pin leaves it for now; %s",
                seen.label or str(seen.key),
                seen.value,
                suspects(seen.key.kind, writers),
            )

    def _writers(self, irqbalance: tuple[int, ...]) -> Writers:
        """Return who writes such values on this node; reads every process once."""
        every = processes(self._root)
        names = {} if isinstance(every, Unknown) else {pid: one.comm for pid, one in every.items()}
        return Writers(irqbalance, read_tuned(self._root, names), read_crio(self._root, names))


def _named(state: QuietState) -> str:
    if not state.quiet:
        return "none"
    return f"{state.quiet} (in full: {state.full})" if state.full else str(state.quiet)
