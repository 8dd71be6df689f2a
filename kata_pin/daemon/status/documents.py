"""The documents that the daemon answers with (model/reports), but for single sandboxes.

The command line makes them itself when the daemon is down (D19).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from kata_pin.daemon.reconcile.slices import Slices
from kata_pin.daemon.status.sandbox import SandboxFacts, notes, sandbox_report
from kata_pin.daemon.store import history, node_events
from kata_pin.model import node, placement
from kata_pin.model.reports.daemon import Daemon
from kata_pin.model.reports.history import Change, HistoryDocument, NodeEvent
from kata_pin.model.reports.pools import Allocation
from kata_pin.model.reports.quiet import KeptQuiet
from kata_pin.model.reports.state import CpuPlace, Kubelet, Node, State
from kata_pin.policy.placement.conflicts import conflicts
from kata_pin.wire import reports

NAMED: Final = 3
"""Most sandboxes that a note about a conflict names."""

Conflicts = Mapping[str, Sequence[placement.Note]]
"""Notes by the id of the sandbox whose exclusive pCPUs others claim too."""


def state_report(
    *,
    node: node.Node,
    mode: str,
    daemon: Daemon,
    node_notes: Iterable[placement.Note] = (),
    allocation: Allocation | None = None,
    kept_quiet: KeptQuiet | None = None,
) -> State:
    """Return the state document without sandboxes."""
    return State(
        time=utc(time.time()),
        daemon=daemon,
        node=_node(node, mode),
        sandboxes=(),
        allocation=allocation,
        notes=notes(node_notes),
        kept_quiet=kept_quiet,
    )


def with_sandboxes(state: State, every: Iterable[SandboxFacts], found: Conflicts) -> State:
    """Return the state document with these sandboxes."""
    made = (sandbox_report(facts, found.get(facts.sandbox.id, ())) for facts in every)
    return replace(state, sandboxes=tuple(made))


async def in_slices(state: State, sandboxes: Iterable[bytes | None]) -> bytes:
    """Return the state document with these encoded sandboxes; other tasks run in between."""
    items = []
    slices = Slices()
    for encoded in sandboxes:
        if encoded is not None:
            items.append(encoded)
        await slices.breathe()
    return reports.with_items(reports.encode(state), "sandboxes", b",".join(items))


def conflict_notes(
    placements: Mapping[str, placement.Placement], pod_of: Callable[[str], str]
) -> Conflicts:
    """Return the notes about exclusive pCPUs that several sandboxes claim."""
    found: dict[str, list[placement.Note]] = {}
    for conflict in conflicts(placements):
        named = [(one, pod_of(one)) for one in conflict.sandboxes[: NAMED + 1]]
        for sandbox_id in conflict.sandboxes:
            others = [pod for one, pod in named if one != sandbox_id][:NAMED]
            more = len(conflict.sandboxes) - 1 - len(others)
            listed = ", ".join(others) + (f" and {more} more" if more else "")
            single = len(conflict.cpus) == 1
            which = f"pCPU {conflict.cpus} is" if single else f"pCPUs {conflict.cpus} are"
            text = f"exclusive {which} also claimed by {listed}"
            note = placement.Note("conflict-exclusive", text, placement.NoteLevel.WARNING)
            found.setdefault(sandbox_id, []).append(note)
    return found


def _node(known: node.Node, mode: str) -> Node:
    topology, kubelet = known.topology, known.kubelet
    return Node(
        hostname=socket.gethostname(),
        kernel=os.uname().release,
        online=str(topology.online),
        present=str(topology.present),
        isolated=str(topology.isolated),
        nohz_full=str(topology.nohz_full),
        cpus=tuple(
            CpuPlace(cpu.cpu, cpu.node, cpu.package, cpu.llc, cpu.core, cpu.thread, cpu.kind)
            for cpu in topology.cpus
        ),
        kubelet=None if kubelet is None else Kubelet(kubelet.policy, str(kubelet.default)),
        thread_events=known.live_threads,
        mode=mode,
        assigned=str(known.assigned),
    )


def history_report(
    rows: Iterable[history.Change], events: Iterable[node_events.NodeEvent] = ()
) -> HistoryDocument:
    """Return the `history` document."""
    now_ns, now = time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time()
    return HistoryDocument(
        time=utc(now),
        changes=tuple(_change(row, now_ns, now) for row in rows),
        events=tuple(
            NodeEvent(*_when(one.boot_ns, now_ns, now), one.kind, one.text) for one in events
        ),
    )


def _when(boot_ns: int, now_ns: int, now: float) -> tuple[str, float]:
    """Return a time of CLOCK_BOOTTIME as UTC, and how long ago it is in seconds."""
    age_s = max(0.0, (now_ns - boot_ns) / 1e9)
    when = datetime.fromtimestamp(now - age_s, tz=UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z"), round(age_s, 3)


def _change(row: history.Change, now_ns: int, now: float) -> Change:
    when, age_s = _when(row.boot_ns, now_ns, now)
    return Change(
        time=when,
        age_s=age_s,
        sandbox=row.sandbox_id,
        pod=row.pod,
        state=row.state,
        previous_state=row.was_state,
        mask=row.mask,
        previous_mask=row.was_mask,
        threads=row.threads,
        moved=row.moved,
        triggers=tuple(row.reasons.split("\n")) if row.reasons else (),
        latency_ms=round(row.waited_us / 1000, 3),
    )


def utc(seconds: float) -> str:
    """Return a Unix time as documents have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
