"""`who`: every host thread that may run on some pCPUs, and its owner.

Read here, because the daemon knows threads of sandboxes only; the state document says which threads
belong to which sandbox and which pCPUs are exclusive. Threads that exit meanwhile are left out. An
intruder is a user process allowed on an exclusive pCPU of a sandbox that it does not work for.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

from kata_pin.cli.reports import pcpus, processes, words
from kata_pin.cli.reports.pcpus import Pcpu
from kata_pin.errors import KataPinError, TaskGone
from kata_pin.host.files import read_text
from kata_pin.host.root import HOST
from kata_pin.host.tasks import get_affinity, list_tids
from kata_pin.model.cpuset import CpuSet, union
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
    WhoPcpu,
)
from kata_pin.model.thread import Process

Known = Mapping[int, tuple[Sandbox, Thread]]
"""The threads of the state document, by tid."""


Found = tuple[Process, tuple[ProcessThread, ...]]
"""A process of the host, with its threads that may run on the pCPUs asked for."""


def who(state: State, cpus: CpuSet) -> WhoDocument:
    """Return the `who` document of some pCPUs; raises KataPinError if one does not exist.

    Takes 0.2 s, in which it measures how busy the pCPUs are.
    """
    online = pcpus.parse(state.node.online)
    absent = cpus - pcpus.parse(state.node.present) - online
    if absent:
        hint = f"present pCPUs: {state.node.present}"
        raise KataPinError(f"no {pcpus.named(absent)} on this node", hint=hint)
    here = {pcpu.number: pcpu for pcpu in pcpus.view(state) if pcpu.number in cpus}
    busy = processes.busy_percents(online) if here else {}
    known = _known_threads(state)
    found = list(threads_on(cpus, known)) if here else []
    return WhoDocument(
        time=state.time,
        daemon=state.daemon,
        cpus=str(cpus),
        pcpus=tuple(_pcpu(cpu, here.get(cpu), state, busy.get(cpu)) for cpu in cpus),
        processes=_processes(found, known, here),
        kernel=_kernel(found, cpus),
    )


def _pcpu(cpu: int, here: Pcpu | None, state: State, busy: float | None) -> WhoPcpu:
    if here is None:
        return WhoPcpu(cpu, online=False, place=None, claims=())
    return WhoPcpu(
        cpu, online=True, place=_place(here, state), claims=_claims(here), busy_percent=busy
    )


def intruders(
    state: State, about: Container[str] | None = None
) -> list[tuple[HostProcess, CpuSet]]:
    """Return the processes with threads allowed on exclusive pCPUs of others, with those CPUs.

    `about` are the ids of the sandboxes whose pCPUs matter; None: of all.
    """
    exclusive = {
        pcpu.number: pcpu
        for pcpu in pcpus.view(state)
        if any(about is None or one.id in about for one in pcpu.exclusive)
    }
    if not exclusive:
        return []
    known = _known_threads(state)
    found = []
    for process, threads in threads_on(CpuSet(exclusive), known):
        entered = {
            thread: _entered(
                thread, known[thread.tid][0].id if thread.tid in known else "", exclusive
            )
            for thread in (() if process.kernel else threads)
        }
        if intruding := tuple(thread for thread, cpus in entered.items() if cpus):
            entry = _process(process, intruding, known, intruder=True)
            found.append((entry, union(entered.values())))
    return found


def _entered(thread: ProcessThread, sandbox_id: str, view: Mapping[int, Pcpu]) -> CpuSet:
    """Return the pCPUs of the view that are exclusive to others than the thread's sandbox."""
    others = (
        number
        for number, pcpu in view.items()
        if pcpu.exclusive and all(one.id != sandbox_id for one in pcpu.exclusive)
    )
    return pcpus.parse(thread.affinity) & CpuSet(others)


def threads_on(cpus: CpuSet, known: Known) -> Iterator[Found]:
    """Yield the host's processes that may run on one of the pCPUs, with their threads there."""
    for process in processes.every_process():
        with suppress(TaskGone):
            threads = tuple(
                ProcessThread(
                    tid=tid,
                    comm=_comm(process.pid, tid),
                    affinity=str(affinity),
                    label=known[tid][1].label if tid in known else "",
                )
                for tid in list_tids(HOST, process.pid)
                if not (affinity := _affinity(tid)).isdisjoint(cpus)
            )
            if threads:
                yield process, threads


def _affinity(tid: int) -> CpuSet:
    """Return a thread's affinity, empty once it has exited."""
    try:
        return get_affinity(tid)
    except TaskGone:
        return CpuSet()


def _comm(pid: int, tid: int) -> str:
    """Return the thread's name; `?` when it exits right now."""
    try:
        return read_text(HOST.proc(pid, "task", tid, "comm")).rstrip("\n")
    except OSError:
        return "?"


def _known_threads(state: State) -> Known:
    return {t.tid: (s, t) for s in state.sandboxes for t in s.threads}


def _place(pcpu: Pcpu, state: State) -> Place:
    place = pcpu.place
    siblings = CpuSet(one.cpu for one in state.node.cpus if one.core == place.core)
    return Place(**asdict(place), siblings=str(siblings), marks=pcpu.marks)


def _claims(pcpu: Pcpu) -> tuple[CpuClaim, ...]:
    exclusive = [(sandbox, "exclusive") for sandbox in pcpu.exclusive]
    shared = [(sandbox, "shared") for sandbox in pcpu.shared]
    return tuple(
        CpuClaim(sandbox.id, sandbox.pod, claim, pcpus.owning_container(sandbox, pcpu.number))
        for sandbox, claim in (*exclusive, *shared)
    )


def _processes(
    found: Sequence[Found], known: Known, here: Mapping[int, Pcpu]
) -> tuple[HostProcess, ...]:
    """Return the user processes with their threads allowed here, intruders first."""
    entries = []
    for process, threads in found:
        owned = _owned(threads, known)
        if owned or not process.kernel:
            mine = owned.id if owned else ""
            intruder = any(_entered(thread, mine, here) for thread in threads)
            entries.append(_process(process, threads, known, intruder=intruder))
    return tuple(sorted(entries, key=lambda e: (not e.intruder, e.pod == "", e.pod, e.pid)))


def _owned(threads: Sequence[ProcessThread], known: Known) -> Sandbox | None:
    return next((known[t.tid][0] for t in threads if t.tid in known), None)


def _process(
    process: Process, threads: tuple[ProcessThread, ...], known: Known, *, intruder: bool
) -> HostProcess:
    owned = _owned(threads, known)
    return processes.described(
        process,
        threads,
        sandbox=owned.id if owned else "",
        pod=words.owner(owned) if owned else "",
        intruder=intruder,
    )


def _kernel(found: Sequence[Found], cpus: CpuSet) -> KernelThreads:
    """Return the kernel's threads: those that may run on these pCPUs only, and the others."""
    threads = [thread for process, threads in found if process.kernel for thread in threads]
    bound, roaming = (
        tuple(
            KernelThread(t.tid, t.comm)
            for t in threads
            if (pcpus.parse(t.affinity) <= cpus) is wanted
        )
        for wanted in (True, False)
    )
    return KernelThreads(bound, roaming)
