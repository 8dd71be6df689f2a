"""`who`: every host thread that may run on some pCPUs.

`check` counts the processes that may run on exclusive pCPUs of others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Literal

import psutil
from msgspec import Struct
from msgspec.structs import asdict, replace

from kata_pin.base.counters import SeenTask
from kata_pin.base.cpuset import EMPTY, CpuSet, named_pcpus, union
from kata_pin.base.documents.check import IntruderGroup
from kata_pin.base.documents.measured import (
    CpuClaim,
    HostProcess,
    KernelThread,
    KernelThreads,
    Place,
    ProcessThread,
    WhoDocument,
    WhoPcpu,
)
from kata_pin.base.documents.state import Sandbox, State, Thread
from kata_pin.base.errors import HostError, KataPinError, ParseError, TaskGone
from kata_pin.base.sandbox import Process
from kata_pin.base.values import TaskClass
from kata_pin.cli.reports import owners, pcpus, words
from kata_pin.cli.reports.pcpus import Pcpu
from kata_pin.linux.files import HOST, read_once, read_text
from kata_pin.linux.proc import parse_stat
from kata_pin.linux.process import cmdline, read_process
from kata_pin.linux.switches import look_at
from kata_pin.linux.tasks import get_affinity, list_tids
from kata_pin.placement import remedies
from kata_pin.placement.owners import place_of

# Processes of the host and the load of its pCPUs, by psutil; threads are host/'s (ADR 4).
#
# Names and command lines are read here: psutil reads /proc/PID/cmdline whole, even for a name, and
# any user can make that file as long as the address space (PR_SET_MM_MAP).

MAX_COMMAND: Final = 200
"""Characters of a command line that are reported."""


def why_hidden() -> str:
    """Return why other users' processes cannot be seen from here, empty where they can be.

    proc_pid(5): with hidepid=1 their files cannot be read, with hidepid=2 they are not listed.
    """
    try:
        read_process(HOST, 1)
    except HostError:
        return "this user cannot see the processes of others (/proc is mounted with hidepid)"
    return ""


def every_process() -> Iterator[Process]:
    """Yield the processes of this host; those that exit meanwhile are left out."""
    for pid in psutil.pids():
        with suppress(TaskGone):
            yield read_process(HOST, pid)


def described(process: Process) -> HostProcess:
    """Return a process of no sandbox with its user, command line, age and CPU time.

    What cannot be read, or no longer can, is empty or None.
    """
    facts = {}
    with suppress(psutil.NoSuchProcess):
        facts = psutil.Process(process.pid).as_dict(("username", "create_time", "cpu_times"))
    born, times = facts.get("create_time"), facts.get("cpu_times")
    return HostProcess(
        pid=process.pid,
        comm=process.comm,
        user=facts.get("username") or "",
        command=command(process.pid),
        age_s=None if born is None else max(0.0, time.time() - born),
        cpu_s=None if times is None else times.user + times.system,
        sandbox="",
        pod="",
        intruder=False,
        threads=(),
    )


def command(pid: int) -> str:
    """Return the start of a process's command line, empty if there is none to read."""
    try:
        words = " ".join(cmdline(HOST, pid)).strip()
    except HostError:
        return ""
    return words if len(words) <= MAX_COMMAND else f"{words[: MAX_COMMAND - 3]}..."


def busy_percents(online: CpuSet) -> dict[int, float]:
    """Return how busy each pCPU is during 0.2 s, in percent; empty if that is unknown."""
    loads = psutil.cpu_percent(0.2, percpu=True)
    # psutil lists online pCPUs in order, without their numbers
    return dict(zip(online, loads, strict=True)) if len(loads) == len(online) else {}


# `who`: every host thread that may run on some pCPUs, and its owner.
#
# Read here, because the daemon knows threads of sandboxes only; the state document says which
# threads belong to which sandbox and which pCPUs are exclusive. Threads that exit meanwhile are
# left out. An intruder is a user process allowed on an exclusive pCPU of a sandbox that it does not
# work for.

Known = Mapping[int, tuple[Sandbox, Thread]]
"""The threads of the state document, by tid."""


Found = tuple[Process, tuple[ProcessThread, ...]]
"""A process of the host, with its threads that may run on the pCPUs asked for."""


def exclusive(state: State) -> CpuSet:
    """Return the exclusive pCPUs of every sandbox; raises KataPinError if there are none."""
    cpus = union(pcpus.parse(sandbox.exclusive) for sandbox in state.sandboxes)
    if not cpus:
        hint = "name pCPUs, such as kata-pin who 0-3"
        raise KataPinError("no sandbox of this node has exclusive pCPUs", hint=hint)
    return cpus


def who(state: State, cpus: CpuSet) -> WhoDocument:
    """Return the `who` document of some pCPUs; raises KataPinError if one does not exist.

    Takes 0.2 s, in which it measures how busy the pCPUs are.
    """
    online = pcpus.parse(state.node.online)
    absent = cpus - pcpus.parse(state.node.present) - online
    if absent:
        hint = f"present pCPUs: {state.node.present}"
        raise KataPinError(f"no {named_pcpus(absent)} on this node", hint=hint)
    here = {pcpu.number: pcpu for pcpu in pcpus.view(state) if pcpu.number in cpus}
    busy = busy_percents(online) if here else {}
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
    for process in every_process():
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
    def claim(sandbox: Sandbox, kind: Literal["exclusive", "shared"]) -> CpuClaim:
        container = pcpus.owning_container(sandbox, pcpu.number)
        return CpuClaim(sandbox.id, sandbox.pod, kind, container)

    exclusive = [claim(sandbox, "exclusive") for sandbox in pcpu.exclusive]
    return (*exclusive, *(claim(sandbox, "shared") for sandbox in pcpu.shared))


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
    found = replace(described(process), threads=threads, intruder=intruder)
    return replace(found, sandbox=owned.id, pod=words.owner(owned)) if owned else found


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


# Processes that may run on exclusive pCPUs of others, by systemd unit, pod or cgroup.
#
# Read here as `who` does. How long a process used one pCPU is not recorded by Linux, so what ran
# there last counts first.

MOST_PIDS: Final = 20
"""Most processes that a command names one by one."""

_TICKS: Final = os.sysconf("SC_CLK_TCK")

_V2: Final = "/sys/fs/cgroup/cgroup.controllers"


class Intruder(Struct, frozen=True):
    """A process with threads allowed on exclusive pCPUs of others.

    `last_there` are those that ran there last, which used `there_s` seconds of CPU time, wherever.
    """

    process: HostProcess
    cpus: CpuSet
    task: SeenTask
    last_there: int
    there_s: float


def node_of(state: State) -> remedies.NodeConditions:
    """Return what remedies depend on."""
    return remedies.NodeConditions(owners.free(state), os.path.exists(_V2))


def groups(
    state: State, about: Container[str] | None, ran_ms: Mapping[int, float]
) -> tuple[IntruderGroup, ...]:
    """Return them; those that used most time there first, as far as that can be known.

    `about` are the ids of the sandboxes whose pCPUs matter; None: of all. `ran_ms` is how long each
    process, by pid, ran there while that was measured.
    """
    found = (_looked_at(process, cpus) for process, cpus in intruders(state, about))
    masks = owners.known(state).masks
    return grouped([one for one in found if one is not None], node_of(state), ran_ms, masks)


def _looked_at(process: HostProcess, cpus: CpuSet) -> Intruder | None:
    """Return a process as it is now, None if it is gone."""
    task = look_at(HOST, process.pid)
    if task is None:
        return None
    there = []
    for thread in process.threads:
        with suppress(OSError, ParseError):  # it ended
            stat = parse_stat(read_once(HOST.proc(process.pid, "task", thread.tid, "stat")))
            if stat.processor in cpus:
                there.append(stat.utime + stat.stime)
    return Intruder(process, cpus, task, len(there), sum(there) / _TICKS)


def grouped(
    intruders: Sequence[Intruder],
    node: remedies.NodeConditions,
    ran_ms: Mapping[int, float],
    masks: Mapping[str, CpuSet],
) -> tuple[IntruderGroup, ...]:
    """Return the processes by sandbox, pod, systemd unit or cgroup.

    `masks` are the sandboxes' by id.
    """
    members: dict[str, list[Intruder]] = {}
    for one in intruders:
        members.setdefault(_name(one), []).append(one)
    every = (_group(name, several, node, ran_ms, masks) for name, several in members.items())
    return tuple(
        sorted(every, key=lambda one: (-one.measured_ms, -one.there_s, -one.cpu_s, one.name))
    )


def _name(one: Intruder) -> str:
    place = place_of(one.task.cgroup)
    pod = one.process.pod or (f"pod {place.pod_uid}" if place.pod_uid else "")
    if not (pod or one.process.sandbox) and remedies.is_ours(one.task):  # theirs have any name
        return "kata-pin itself"
    return pod or place.unit or f"cgroup {one.task.cgroup or 'unknown'}"


def _group(
    name: str,
    members: Sequence[Intruder],
    node: remedies.NodeConditions,
    ran_ms: Mapping[int, float],
    masks: Mapping[str, CpuSet],
) -> IntruderGroup:
    def used(one: Intruder) -> tuple[float, float, float]:
        return ran_ms.get(one.process.pid, 0.0), one.there_s, one.process.cpu_s or 0.0

    members = sorted(members, key=used, reverse=True)
    most = members[0]
    sandbox = most.process.sandbox
    kind = TaskClass.OTHER_SANDBOX if sandbox else TaskClass.USER
    is_theirs = most.cpus <= masks.get(sandbox, EMPTY)
    of_task = partial(remedies.of_task, kind=kind, node=node, sandbox=sandbox, is_vms=bool(sandbox))
    remedy = of_task(most.task, is_theirs=is_theirs)
    movable = (one for one in members if of_task(one.task).command)
    pids = [str(one.process.pid) for one in movable]
    command = remedy.command
    if len(pids) > 1 and command.startswith("taskset "):
        loop = f"for pid in {' '.join(pids)}; do {command.removesuffix(pids[0])}$pid; done"
        command = loop if len(pids) <= MOST_PIDS else ""
    return IntruderGroup(
        name=name,
        unit=place_of(most.task.cgroup).unit,
        cgroup=most.task.cgroup,
        sandbox=sandbox,
        cpus=str(union(one.cpus for one in members)),
        threads=sum(len(one.process.threads) for one in members),
        measured_ms=round(sum(ran_ms.get(one.process.pid, 0.0) for one in members), 3),
        last_there=sum(one.last_there for one in members),
        there_s=round(sum(one.there_s for one in members), 2),
        cpu_s=round(sum(one.process.cpu_s or 0.0 for one in members), 2),
        processes=tuple(one.process for one in members),
        remedy=remedy.text,
        command=command,
    )
