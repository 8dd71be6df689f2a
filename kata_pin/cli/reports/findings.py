"""`check`: what is not as it should be in a state document, and what was measured. Pure."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from typing import Final

from kata_pin.cli.reports import owners, pcpus, words
from kata_pin.cli.reports.foreign import NOTHING, Looked
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.placement import NoteLevel
from kata_pin.model.reports.check import CheckDocument, Finding, IntruderGroup
from kata_pin.model.reports.daemon import Daemon
from kata_pin.model.reports.sandbox import Sandbox
from kata_pin.model.reports.state import State
from kata_pin.policy.placement.notes import RUNS_ON_OTHERS

_ELSEWHERE: Final = frozenset({"conflict-exclusive"})
"""Codes of notes that are findings of their own."""


def check(
    state: State,
    intruders: Sequence[IntruderGroup],
    *,
    intruders_fail: bool,
    about: Container[str] | None = None,
    looked: Looked = NOTHING,
    unknown: Sequence[str] = (),
) -> CheckDocument:
    """Return the `check` document.

    `about` are the ids of the sandboxes to check, against every other one; None: all. `looked` is
    what was measured, `unknown` what else could not be checked, and why.
    """
    unknown = (*unknown, *looked.unknown)
    chosen = [one for one in state.sandboxes if about is None or one.id in about]
    found = [
        *_drift(chosen),
        *looked.findings,
        *_conflicts(state.sandboxes, {one.id for one in chosen}),
        *_double_grants(state, about),
        *_orphans(chosen),
        *_unplaced(chosen),
        *_warnings(chosen),
        *_intruders(intruders, fails=intruders_fail),
    ]
    fails = any(finding.fails for finding in found)
    verdict = "findings" if fails else "unknown" if unknown else "ok"
    return CheckDocument(
        time=state.time,
        daemon=state.daemon,
        verdict=verdict,
        ok=verdict == "ok",
        unknown=tuple(unknown),
        sandboxes=len(chosen),
        threads=sum(len(sandbox.threads) for sandbox in chosen),
        findings=tuple(found),
        free=str(owners.free(state)),
        measured=looked.measured,
    )


def could_not_tell(why: str) -> CheckDocument:
    """Return the `check` document where nothing could be checked."""
    return CheckDocument(
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        daemon=Daemon(running=False, reason=why),
        verdict="unknown",
        ok=False,
        unknown=(why,),
        sandboxes=0,
        threads=0,
        findings=(),
        free="",
    )


def _drift(sandboxes: Sequence[Sandbox]) -> Iterator[Finding]:
    for sandbox in sandboxes:
        for thread in sandbox.threads:
            if thread.state == "drift":
                text = (
                    f"{words.owner(sandbox)}: {thread.label} (tid {thread.tid}): "
                    f"affinity {thread.affinity}, expected {thread.expected}"
                )
                yield Finding("drift", True, sandbox.id, thread.affinity, text)


def _conflicts(sandboxes: Sequence[Sandbox], chosen: Container[str]) -> Iterator[Finding]:
    """Yield each pair with a chosen sandbox of which one may use exclusive pCPUs of the other."""
    masks = [(s, pcpus.parse(s.mask), pcpus.parse(s.exclusive)) for s in sandboxes]
    claimed = [entry for entry in masks if entry[2]]
    for sandbox, _, exclusive in claimed:
        for other, mask, also_exclusive in masks:
            both = exclusive & mask
            # Where both claim exclusively, the pair is reported once.
            twice = exclusive & also_exclusive
            if not both or other is sandbox or (twice and other.id < sandbox.id):
                continue
            if sandbox.id in chosen or other.id in chosen:
                yield _conflict(sandbox, other, both)


def _conflict(sandbox: Sandbox, other: Sandbox, cpus: CpuSet) -> Finding:
    first, second = words.owner(sandbox), words.owner(other)
    which = f"{pcpus.named(cpus)} {'is' if len(cpus) == 1 else 'are'}"
    if cpus <= pcpus.parse(other.exclusive):
        text = f"{which} exclusive to both {first} and {second}"
    else:
        text = f"{which} exclusive to {first} and in the mask of {second}"
    return Finding("conflict", True, sandbox.id, str(cpus), text)


def _double_grants(state: State, about: Container[str] | None) -> Iterator[Finding]:
    """Yield pCPUs granted by kata-pin that are exclusive to a container of no sandbox here."""
    allocation = state.allocation
    if allocation is None or allocation.suspended:
        return
    known = {container.id for sandbox in state.sandboxes for container in sandbox.containers}
    for holder in allocation.holders:
        for grant in allocation.grants:
            both = pcpus.parse(holder.cpus) & pcpus.parse(grant.exclusive)
            if both and holder.id not in known and (about is None or grant.sandbox in about):
                which = f"{pcpus.named(both)} {'is' if len(both) == 1 else 'are'}"
                text = (
                    f"{which} exclusive to both {grant.pod} (granted by kata-pin) and "
                    f"{holder.pod} ({words.holder_source(holder)})"
                )
                yield Finding("conflict", True, grant.sandbox, str(both), text)


def _orphans(sandboxes: Sequence[Sandbox]) -> Iterator[Finding]:
    """Yield VMMs that outlived their shim: nothing of Kata's will end them, or free their CPUs."""
    for sandbox in sandboxes:
        vmm = sandbox.vmm
        if vmm is not None and vmm.orphan:
            cpus = union(pcpus.parse(thread.affinity) for thread in sandbox.threads)
            text = (
                f"{words.owner(sandbox)}: its shim has exited, and {vmm.kind} (pid {vmm.pid}) still"
                f" runs on {pcpus.named(cpus)}: end it once its pod is gone"
            )
            yield Finding("orphan", True, sandbox.id, str(cpus), text)


def _unplaced(sandboxes: Sequence[Sandbox]) -> Iterator[Finding]:
    for sandbox in sandboxes:
        name = words.owner(sandbox)
        if sandbox.state == "no-vmm":
            why = sandbox.vmm_problem or "none found"
            yield Finding("no-vmm", False, sandbox.id, "", f"{name}: no VMM: {why}")
        elif sandbox.state == "unpinned":
            text = f"{name}: no container has a cpuset; its threads are not confined"
            yield Finding("unpinned", False, sandbox.id, "", text)


def _warnings(sandboxes: Sequence[Sandbox]) -> Iterator[Finding]:
    """Yield what passes warn of; threads that cannot leave another pod's CPUs are a conflict."""
    for sandbox in sandboxes:
        for note in sandbox.notes:
            if note.level == NoteLevel.WARNING and note.code not in _ELSEWHERE:
                text = f"{words.owner(sandbox)}: {note.text}"
                fails = note.code == RUNS_ON_OTHERS
                yield Finding("conflict" if fails else "warning", fails, sandbox.id, "", text)


def _intruders(groups: Sequence[IntruderGroup], *, fails: bool) -> Iterator[Finding]:
    for group in groups:
        most = group.processes[0]
        facts = [f"pid {most.pid}", most.user and f"user {most.user}"]
        who = f"{most.comm} ({', '.join(fact for fact in facts if fact)})"
        others = len(group.processes) - 1
        who += f" and {count(others, 'more process', 'more processes')}" if others else ""
        used = [f"CPU time {group.cpu_s:.1f} s"]
        if group.measured_ms:
            used.append(f"{group.measured_ms:.1f} ms there just now")
        if group.last_there:
            threads = count(group.last_there, "thread")
            used.append(f"{threads} with {group.there_s:.1f} s ran there last")
        text = (
            f"{group.name}: {who} may run on exclusive {pcpus.named(pcpus.parse(group.cpus))} "
            f"({count(group.threads, 'thread')}; {', '.join(used)}); {group.remedy}"
        )
        text += f"; run: {group.command}" if group.command else ""
        yield Finding("intruder", fails, group.sandbox, group.cpus, text, group)
