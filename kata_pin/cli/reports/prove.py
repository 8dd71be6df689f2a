"""`prove`: measures what runs on exclusive pCPUs, and says what that proves.

The state document says who owns which pCPU and which threads are placed there. It is asked before
and after: a pCPU that changed its owner meanwhile is unproved, and threads that were placed
meanwhile are its owner's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from kata_pin.cli.reports import owners
from kata_pin.host.measure.methods import Asked, Progress, measure
from kata_pin.host.root import HOST, HostRoot
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.windows import Measured, Method, Verdict
from kata_pin.model.reports.prove import ProveDocument, ProvedPcpu, Refused
from kata_pin.model.reports.state import State
from kata_pin.policy.isolation import tables, verdicts
from kata_pin.policy.isolation.classes import Known, Owner
from kata_pin.policy.isolation.counted import judge_counts
from kata_pin.policy.isolation.remedies import Node

_V2: Final = "fs/cgroup/cgroup.controllers"

_K = TypeVar("_K", int, str)


@dataclass(frozen=True)
class Wanted:
    """What is to be proved: which sandboxes (None: all), how long, and what is accepted.

    `methods` are tried in this order.
    """

    about: Container[str] | None = None
    seconds: float = 60.0
    max_foreign_percent: float = 0.0
    irq: bool = False
    methods: tuple[Method, ...] = tuple(Method)


Meter = Callable[[HostRoot, Asked, Progress], Measured]


def prove(
    state_now: Callable[[], State],
    wanted: Wanted,
    *,
    root: HostRoot = HOST,
    progress: Progress = lambda _: None,
    meter: Meter = measure,
) -> ProveDocument:
    """Return the `prove` document; raises KataPinError, of a state that cannot be had."""
    before = state_now()
    owned = owners.owners(before, wanted.about)
    cpus = CpuSet(one.cpu for one in owned)
    mine = {tid for one in owned for tid in one.own}
    threads = tuple(
        (thread.tgid, thread.tid)
        for one in before.sandboxes
        for thread in one.threads
        if thread.tid in mine
    )
    measured = Measured(Method.PERF, {})
    if cpus:
        asked = Asked(
            cpus, wanted.seconds, threads, wanted.methods, wanted.irq, owners.free(before)
        )
        measured = meter(root, asked, progress)
    after = state_now()
    node = Node(owners.free(after), os.path.exists(root.sys(_V2)))
    rows = _rows(measured, owned, (before, after), wanted, node)
    verdict = verdicts.overall(Verdict(row.verdict) for row in rows)
    return ProveDocument(
        time=after.time,
        daemon=after.daemon,
        hostname=after.node.hostname,
        kernel=after.node.kernel,
        verdict=verdict.value,
        reason=_reason(rows) or _nothing(before, wanted),
        method=measured.method.value,
        refused=tuple(Refused(method, reason) for method, reason in measured.refused),
        asked_s=wanted.seconds,
        max_foreign_percent=wanted.max_foreign_percent,
        parts=measured.parts,
        reader_ms=measured.reader_ns / 1e6,
        pcpus=tuple(rows),
    )


def _rows(
    measured: Measured,
    owned: Iterable[Owner],
    states: tuple[State, State],
    wanted: Wanted,
    node: Node,
) -> list[ProvedPcpu]:
    """Return the object of each pCPU."""
    before, after = states
    now = {(one.cpu, one.sandbox): one for one in owners.owners(after, wanted.about)}
    known = _together(owners.known(before), owners.known(after))
    rows = []
    for owner in owned:
        later = now.get((owner.cpu, owner.sandbox))
        both = replace(owner, own={**owner.own, **(later.own if later else {})})
        if measured.method in verdicts.NAMES_TASKS:
            judged = verdicts.judge(measured, both, known, wanted.max_foreign_percent)
            row = tables.pcpu(judged, both, measured, known, node)
        else:
            counts = judge_counts(measured, owner, wanted.max_foreign_percent)
            row = tables.counted(counts, both, measured)
        proved = row.verdict == Verdict.PROVED.value
        if proved and later is None:
            row = _unproved(row, "it did not stay exclusive to its sandbox")
        elif proved and wanted.irq and measured.interrupts is None:
            row = _unproved(row, f"interrupts were not measured: {measured.no_interrupts}")
        rows.append(row)
    return rows


def _nothing(state: State, wanted: Wanted) -> str:
    """Return why there is nothing to prove."""
    about = wanted.about
    pods = [one.pod for one in state.sandboxes if about is None or one.id in about]
    if not pods:
        return "no sandboxes"
    where = pods[0] if len(pods) == 1 else count(len(pods), "sandbox", "sandboxes")
    return f"no exclusive pCPUs in {where}"


def _unproved(row: ProvedPcpu, reason: str) -> ProvedPcpu:
    return replace(row, verdict=Verdict.UNPROVED.value, reason=reason)


def _together(first: Known, second: Known) -> Known:
    """Return what is known in one or the other."""

    def both(one: Mapping[_K, str], other: Mapping[_K, str]) -> dict[_K, str]:
        return {**one, **other}

    return Known(
        both(first.threads, second.threads),
        both(first.processes, second.processes),
        both(first.containers, second.containers),
        both(first.pods, second.pods),
    )


def _reason(rows: Iterable[ProvedPcpu]) -> str:
    """Return the overall verdict in words: how many pCPUs have which; empty without any."""
    numbers: dict[str, list[int]] = {}
    for row in rows:
        numbers.setdefault(row.verdict, []).append(row.cpu)
    parts = []
    for verdict in (Verdict.VIOLATED, Verdict.UNPROVED, Verdict.PROVED):
        cpus = numbers.get(verdict.value, [])
        if cpus:
            parts.append(f"{count(len(cpus), 'pCPU')} {verdict.value} ({CpuSet(cpus)})")
    return ", ".join(parts)
