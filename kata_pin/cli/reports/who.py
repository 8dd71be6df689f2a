"""`who`: every host thread that may run on one pCPU, and its owner.

Read from /proc here, because the daemon knows threads of sandboxes only; the state document says
which threads belong to which sandbox and which pCPUs are exclusive. Threads that exit meanwhile are
left out. An intruder is a user process allowed on an exclusive pCPU of a sandbox that it does not
work for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kata_pin.cli.reports import pcpus, words
from kata_pin.cli.reports.pcpus import Pcpu
from kata_pin.errors import KataPinError, TaskGone
from kata_pin.host.files import read_text
from kata_pin.host.process import read_process
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import get_affinity, list_tids
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.reports.sandbox import Sandbox, Thread
from kata_pin.model.reports.state import State
from kata_pin.model.reports.who import (
    CpuClaim,
    HostProcess,
    KernelThread,
    KernelThreads,
    Place,
    ProcessThread,
    WhoDocument,
)
from kata_pin.model.thread import Process


@dataclass(frozen=True)
class HostThread:
    """One thread of the host."""

    process: Process
    tid: int
    comm: str
    affinity: CpuSet


def threads_on(root: HostRoot, cpus: CpuSet) -> Iterator[HostThread]:
    """Yield every thread of the host that may run on one of the pCPUs."""
    for name in os.listdir(root.proc()):
        if name.isdecimal():
            with suppress(TaskGone):
                yield from _of_process(root, int(name), cpus)


def _of_process(root: HostRoot, pid: int, cpus: CpuSet) -> Iterator[HostThread]:
    process: Process | None = None
    for tid in list_tids(root, pid):
        with suppress(TaskGone):
            affinity = get_affinity(tid, root)
            if not affinity.isdisjoint(cpus):
                process = process or read_process(root, pid)
                yield HostThread(process, tid, _comm(root, pid, tid), affinity)


def _comm(root: HostRoot, pid: int, tid: int) -> str:
    """Return the thread's name; `?` when it exits right now."""
    try:
        return read_text(root.proc(pid, "task", tid, "comm")).rstrip("\n")
    except OSError:
        return "?"


def who(root: HostRoot, state: State, cpu: int) -> WhoDocument:
    """Return the `who` document of one pCPU; raises KataPinError if there is no such pCPU."""
    online = next((pcpu for pcpu in pcpus.view(state) if pcpu.number == cpu), None)
    if cpu not in pcpus.parse(state.node.present) | pcpus.parse(state.node.online):
        present = state.node.present
        raise KataPinError(f"no pCPU {cpu} on this node", hint=f"present pCPUs: {present}")
    found = list(threads_on(root, CpuSet([cpu]))) if online else []
    return WhoDocument(
        time=state.time,
        daemon=state.daemon,
        cpu=cpu,
        online=online is not None,
        place=None if online is None else _place(online, state),
        claims=() if online is None else _claims(online),
        processes=_processes(found, state, online),
        kernel=_kernel(found, cpu),
    )


@dataclass(frozen=True)
class Intruder:
    """A process with threads allowed on exclusive pCPUs of others."""

    pid: int
    comm: str
    tids: list[int]
    cpus: CpuSet


def intruders(root: HostRoot, state: State) -> list[Intruder]:
    """Return the processes with threads allowed on exclusive pCPUs of others, with those CPUs."""
    view = {pcpu.number: pcpu for pcpu in pcpus.view(state) if pcpu.exclusive}
    if not view:
        return []
    known = _known_threads(state)
    found: dict[int, Intruder] = {}
    for thread in threads_on(root, CpuSet(view)):
        if thread.process.kernel:
            continue
        owner = known.get(thread.tid)
        mine = owner[0].id if owner else ""
        cpus = CpuSet(n for n in thread.affinity if n in view and not _owns(view[n], mine))
        if cpus:
            pid = thread.process.pid
            entry = found.get(pid) or Intruder(pid, thread.process.comm, [], CpuSet())
            found[pid] = Intruder(pid, entry.comm, [*entry.tids, thread.tid], entry.cpus | cpus)
    return list(found.values())


def _owns(pcpu: Pcpu, sandbox_id: str) -> bool:
    return any(sandbox.id == sandbox_id for sandbox in pcpu.exclusive)


def _known_threads(state: State) -> dict[int, tuple[Sandbox, Thread]]:
    return {t.tid: (s, t) for s in state.sandboxes for t in s.threads}


def _place(pcpu: Pcpu, state: State) -> Place:
    place = pcpu.place
    siblings = CpuSet(one.cpu for one in state.node.cpus if one.core == place.core)
    return Place(
        cpu=place.cpu,
        node=place.node,
        package=place.package,
        llc=place.llc,
        core=place.core,
        thread=place.thread,
        kind=place.kind,
        siblings=str(siblings),
        marks=pcpu.marks,
    )


def _claims(pcpu: Pcpu) -> tuple[CpuClaim, ...]:
    exclusive = [(sandbox, "exclusive") for sandbox in pcpu.exclusive]
    shared = [(sandbox, "shared") for sandbox in pcpu.shared]
    return tuple(
        CpuClaim(sandbox.id, sandbox.pod, claim, pcpus.owning_container(sandbox, pcpu.number))
        for sandbox, claim in (*exclusive, *shared)
    )


def _processes(
    found: Sequence[HostThread], state: State, pcpu: Pcpu | None
) -> tuple[HostProcess, ...]:
    """Return the user processes with their threads allowed here, intruders first."""
    known = _known_threads(state)
    grouped: dict[int, list[HostThread]] = {}
    for thread in found:
        if not thread.process.kernel or thread.tid in known:
            grouped.setdefault(thread.process.pid, []).append(thread)
    entries = [_process(threads, known, pcpu) for threads in grouped.values()]
    return tuple(sorted(entries, key=lambda e: (not e.intruder, e.pod == "", e.pod, e.pid)))


def _process(
    threads: Sequence[HostThread], known: dict[int, tuple[Sandbox, Thread]], pcpu: Pcpu | None
) -> HostProcess:
    process = threads[0].process
    owned = next((known[t.tid][0] for t in threads if t.tid in known), None)
    sandbox_id = owned.id if owned else ""
    exclusive = pcpu is not None and bool(pcpu.exclusive)
    return HostProcess(
        pid=process.pid,
        comm=process.comm,
        sandbox=sandbox_id,
        pod=words.owner(owned) if owned else "",
        intruder=exclusive and pcpu is not None and not _owns(pcpu, sandbox_id),
        threads=tuple(
            ProcessThread(
                tid=t.tid,
                comm=t.comm,
                affinity=str(t.affinity),
                label=known[t.tid][1].label if t.tid in known else "",
            )
            for t in threads
        ),
    )


def _kernel(found: Sequence[HostThread], cpu: int) -> KernelThreads:
    """Return the kernel's threads: those bound to this very pCPU, and those that may roam."""
    only_here = CpuSet([cpu])
    threads = [
        (KernelThread(one.tid, one.comm), one.affinity == only_here)
        for one in found
        if one.process.kernel
    ]
    return KernelThreads(
        bound=tuple(thread for thread, bound in threads if bound),
        roaming=tuple(thread for thread, bound in threads if not bound),
    )
