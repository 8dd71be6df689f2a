"""`check`: drift, conflicts and intruders in a state document. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kata_pin.cli.reports import pcpus, words
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.reports.check import CheckDocument, Finding
from kata_pin.model.reports.sandbox import Sandbox
from kata_pin.model.reports.state import State
from kata_pin.model.reports.who import HostProcess

Intruder = tuple[HostProcess, CpuSet]
"""A process with threads allowed on exclusive pCPUs of others, and these pCPUs."""


def check(state: State, intruders: Sequence[Intruder], *, intruders_fail: bool) -> CheckDocument:
    """Return the `check` document; `ok` is False when any finding fails (exit status 3)."""
    found = [
        *_drift(state),
        *_conflicts(state.sandboxes),
        *_unplaced(state),
        *_intruders(intruders, fails=intruders_fail),
    ]
    return CheckDocument(
        time=state.time,
        daemon=state.daemon,
        ok=not any(finding.fails for finding in found),
        sandboxes=len(state.sandboxes),
        threads=sum(len(sandbox.threads) for sandbox in state.sandboxes),
        findings=tuple(found),
    )


def _drift(state: State) -> Iterator[Finding]:
    for sandbox in state.sandboxes:
        for thread in sandbox.threads:
            if thread.state == "drift":
                text = (
                    f"{words.owner(sandbox)}: {thread.label} (tid {thread.tid}): "
                    f"affinity {thread.affinity}, expected {thread.expected}"
                )
                yield Finding("drift", True, sandbox.id, thread.affinity, text)


def _conflicts(sandboxes: Sequence[Sandbox]) -> Iterator[Finding]:
    """Yield each pair of sandboxes of which one has exclusive pCPUs that the other may use."""
    masks = [(s, pcpus.parse(s.mask), pcpus.parse(s.exclusive)) for s in sandboxes]
    claimed = [entry for entry in masks if entry[2]]
    for sandbox, _, exclusive in claimed:
        for other, mask, also_exclusive in masks:
            both = exclusive & mask
            # Where both claim exclusively, the pair is reported once.
            twice = exclusive & also_exclusive
            if not both or other is sandbox or (twice and other.id < sandbox.id):
                continue
            yield _conflict(sandbox, other, both)


def _conflict(sandbox: Sandbox, other: Sandbox, cpus: CpuSet) -> Finding:
    first, second = words.owner(sandbox), words.owner(other)
    which = f"{_named(cpus)} {'is' if len(cpus) == 1 else 'are'}"
    if cpus <= pcpus.parse(other.exclusive):
        text = f"{which} exclusive to both {first} and {second}"
    else:
        text = f"{which} exclusive to {first} and in the mask of {second}"
    return Finding("conflict", True, sandbox.id, str(cpus), text)


def _unplaced(state: State) -> Iterator[Finding]:
    for sandbox in state.sandboxes:
        name = words.owner(sandbox)
        if sandbox.state == "no-vmm":
            why = sandbox.vmm_problem or "none found"
            yield Finding("no-vmm", False, sandbox.id, "", f"{name}: no VMM: {why}")
        elif sandbox.state == "unpinned":
            text = f"{name}: no container has a cpuset; its threads are not confined"
            yield Finding("unpinned", False, sandbox.id, "", text)


def _intruders(intruders: Sequence[Intruder], *, fails: bool) -> Iterator[Finding]:
    for process, cpus in intruders:
        threads = count(len(process.threads), "thread")
        facts = [
            f"pid {process.pid}",
            process.user and f"user {process.user}",
            process.age_s is not None and f"started {words.age(process.age_s)} ago",
            process.cpu_s is not None and f"CPU time {process.cpu_s:.1f} s",
        ]
        text = (
            f"{process.comm} ({', '.join(fact for fact in facts if fact)}): "
            f"{threads} may run on exclusive {_named(cpus)}"
        )
        text += f"; command: {process.command}" if process.command else ""
        yield Finding("intruder", fails, process.sandbox, str(cpus), text, process)


def _named(cpus: CpuSet) -> str:
    return f"pCPU {cpus}" if len(cpus) == 1 else f"pCPUs {cpus}"
