"""`check`: what differs from the decision in a state document.

Each VMM is also judged by what keeps it on its pCPUs (D5).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct, field

from kata_pin.base.cpuset import CpuSet, named_pcpus, pcpus_are, union
from kata_pin.base.documents.check import (
    CONFLICT,
    DRIFT,
    INTRUDER,
    NO_VMM,
    ORPHAN,
    OTHER_WRITER,
    UNPINNED,
    WARNING,
    CheckDocument,
    Finding,
    IntruderGroup,
    Measurement,
)
from kata_pin.base.documents.document import UNWRITTEN, Daemon
from kata_pin.base.documents.state import Sandbox, State
from kata_pin.base.values import CheckVerdict, NoteLevel, count
from kata_pin.cli.reports import owners, pcpus, words
from kata_pin.cli.reports.pcpus import parse
from kata_pin.placement.notes import RUNS_ON_OTHERS

# What keeps a VMM on its sandbox's pCPUs: its cgroup's cpuset, or affinity alone (D5).
#
# A process may set its own affinity, and what it forks inherits it; none leaves its cgroup's
# cpuset.


def reachable(sandbox: Sandbox, online: CpuSet) -> CpuSet:
    """Return the online pCPUs outside the sandbox's mask that the cgroups of its VMM allow."""
    vmm = sandbox.vmm
    threads = [one for one in sandbox.threads if vmm is not None and one.tgid == vmm.pid]
    return (union(parse(one.cpuset) or online for one in threads) & online) - parse(sandbox.mask)


def in_words(sandbox: Sandbox, online: CpuSet) -> str:
    """Return what keeps the VMM on its pCPUs."""
    others = reachable(sandbox, online)
    if not others:
        return "the cpuset of its cgroup keeps the VMM on them, whatever the VMM does"
    return (
        f"only affinity keeps the VMM off {named_pcpus(others)}, which its cgroup allows: a hostile"
        " VMM can change its own affinity"
    )


_ELSEWHERE: Final = frozenset({"conflict-exclusive", "other-writer"})
"""Codes of notes that are findings of their own."""

_SHARED: Final = (
    "give one of the pods other CPUs; explain says where each container's CPUs come from"
)


class Looked(Struct, frozen=True):
    """What was measured. `unknown` is what could not be, and why; `ran_ms` are times by pid."""

    findings: tuple[Finding, ...] = ()
    unknown: tuple[str, ...] = ()
    ran_ms: Mapping[int, float] = field(default_factory=dict)
    measured: Measurement | None = None


NOTHING: Final = Looked()
"""What was measured where nothing was."""


WRITER_S: Final = 600.0
"""How long affinities must have stayed unchanged before another writer is no finding any more."""


def check(
    state: State,
    intruders: Sequence[IntruderGroup],
    *,
    intruders_fail: bool,
    about: Container[str] | None = None,
    looked: Looked = NOTHING,
    unknown: Sequence[str] = (),
    added: Sequence[Finding] = (),
) -> CheckDocument:
    """Return the `check` document.

    `about` are the ids of the sandboxes to check, against every other one; None: all. `looked` is
    what was measured, `unknown` what else could not be checked, and why; `added` are findings of
    options of other packages.
    """
    unwritten = (note.text for note in state.notes if note.code == UNWRITTEN)
    unknown = (*unknown, *looked.unknown, *unwritten)
    chosen = [one for one in state.sandboxes if about is None or one.id in about]
    found = [
        *_drift(chosen),
        *_writers(chosen, pcpus.parse(state.node.online)),
        *looked.findings,
        *_conflicts(state.sandboxes, {one.id for one in chosen}),
        *_double_grants(state, about),
        *_orphans(chosen),
        *_unplaced(chosen),
        *_warnings(chosen),
        *_intruders(intruders, _owners(state), fails=intruders_fail),
        *(one for one in added if about is None or one.sandbox in about),
    ]
    fails = any(finding.fails for finding in found)
    verdict: CheckVerdict = "findings" if fails else "unknown" if unknown else "ok"
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
                yield DRIFT.found(
                    *(sandbox.id, thread.affinity, text),
                    owner=words.owner(sandbox),
                    who=f"{thread.label} (tid {thread.tid}), expected on {thread.expected}",
                    command=_command("pin", sandbox),
                )


def _writers(sandboxes: Sequence[Sandbox], online: CpuSet) -> Iterator[Finding]:
    """Yield sandboxes whose affinities something else changes: the VMM itself may (D5)."""
    for sandbox in sandboxes:
        for writer in sandbox.writers:
            recent = writer.active or (writer.last_s is not None and writer.last_s < WRITER_S)
            if writer.name == "other" and recent:
                text = (
                    f"{words.owner(sandbox)}: {words.writer(writer)}; {in_words(sandbox, online)}"
                )
                yield OTHER_WRITER.found(
                    *(sandbox.id, "", text),
                    owner=words.owner(sandbox),
                    who=words.changes(writer),
                    since_s=writer.since_s,
                    remedy=f"find what changes affinities; {in_words(sandbox, online)}",
                )


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
    which = pcpus_are(cpus)
    if cpus <= pcpus.parse(other.exclusive):
        text = f"{which} exclusive to both {first} and {second}"
    else:
        text = f"{which} exclusive to {first} and in the mask of {second}"
    return CONFLICT.found(
        *(sandbox.id, str(cpus), text),
        owner=first,
        who=second,
        remedy=_SHARED,
        command=_command("explain", other),
    )


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
                text = (
                    f"{pcpus_are(both)} exclusive to both {grant.pod} (granted by kata-pin) and "
                    f"{holder.pod} ({words.holder_source(holder)})"
                )
                yield CONFLICT.found(
                    *(grant.sandbox, str(both), text),
                    owner=grant.pod,
                    who=f"{holder.pod} ({words.holder_source(holder)})",
                    remedy=_SHARED,
                )


def _orphans(sandboxes: Sequence[Sandbox]) -> Iterator[Finding]:
    """Yield VMMs that outlived their shim: nothing of Kata's will end them, or free their CPUs."""
    for sandbox in sandboxes:
        vmm = sandbox.vmm
        if vmm is not None and vmm.orphan:
            cpus = union(pcpus.parse(thread.affinity) for thread in sandbox.threads)
            text = (
                f"{words.owner(sandbox)}: its shim has exited, and {vmm.kind} (pid {vmm.pid}) still"
                f" runs on {named_pcpus(cpus)}: end it once its pod is gone"
            )
            yield ORPHAN.found(
                *(sandbox.id, str(cpus), text),
                owner=words.owner(sandbox),
                who=f"{vmm.kind} (pid {vmm.pid}), its shim has exited",
                command=f"kill {vmm.pid}",
            )


def _unplaced(sandboxes: Sequence[Sandbox]) -> Iterator[Finding]:
    for sandbox in sandboxes:
        name = words.owner(sandbox)
        if sandbox.state == "no-vmm":
            why = sandbox.vmm_problem or "none found"
            text = f"{name}: no VMM: {why}"
            yield NO_VMM.found(sandbox.id, "", text, owner=name, who=why)
        elif sandbox.state == "unpinned":
            text = f"{name}: no container has a cpuset; its threads are not confined"
            yield UNPINNED.found(sandbox.id, "", text, owner=name, who="no container has a cpuset")


def _warnings(sandboxes: Sequence[Sandbox]) -> Iterator[Finding]:
    """Yield what passes warn of; threads that cannot leave another pod's CPUs are a conflict."""
    for sandbox in sandboxes:
        for note in sandbox.notes:
            if note.level == NoteLevel.WARNING and note.code not in _ELSEWHERE:
                text = f"{words.owner(sandbox)}: {note.text}"
                row = CONFLICT if note.code == RUNS_ON_OTHERS else WARNING
                yield row.found(sandbox.id, "", text, owner=words.owner(sandbox), who=note.text)


def _command(name: str, sandbox: Sandbox) -> str:
    return f"kata-pin {name} {shlex.quote(words.owner(sandbox))}"


def _owners(state: State) -> dict[int, str]:
    """Return the pod that owns each exclusive pCPU; of several, one."""
    return {
        cpu: words.owner(sandbox)
        for sandbox in state.sandboxes
        for cpu in pcpus.parse(sandbox.exclusive)
    }


def _intruders(
    groups: Sequence[IntruderGroup], owned: Mapping[int, str], *, fails: bool
) -> Iterator[Finding]:
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
            f"{group.name}: {who} may run on exclusive {named_pcpus(pcpus.parse(group.cpus))} "
            f"({count(group.threads, 'thread')}; {', '.join(used)}); {group.remedy}"
        )
        text += f"; run: {group.command}" if group.command else ""
        pods = dict.fromkeys(owned[cpu] for cpu in pcpus.parse(group.cpus) if cpu in owned)
        yield INTRUDER.found(
            *(group.sandbox, group.cpus, text),
            fails=fails,
            group=group,
            owner=", ".join(pods),
            who=f"{group.name}: {who}",
            remedy=group.remedy,
            command=group.command,
        )
