"""Processes that may run on exclusive pCPUs of others, by systemd unit, pod or cgroup.

Read here as `who` does. How long a process used one pCPU is not recorded by Linux, so what ran
there last counts first.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kata_pin.cli.reports import owners
from kata_pin.cli.reports import who as who_report
from kata_pin.errors import ParseError
from kata_pin.host.files import read_once
from kata_pin.host.measure.seen import look_at
from kata_pin.host.root import HOST
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.measured.windows import SeenTask, TaskClass
from kata_pin.model.reports.check import IntruderGroup
from kata_pin.model.reports.state import State
from kata_pin.model.reports.who import HostProcess
from kata_pin.policy.isolation import remedies
from kata_pin.policy.isolation.places import place_of
from kata_pin.wire.proc import parse_stat

MOST_PIDS: Final = 20
"""Most processes that a command names one by one."""

_TICKS: Final = os.sysconf("SC_CLK_TCK")

_V2: Final = "/sys/fs/cgroup/cgroup.controllers"


@dataclass(frozen=True)
class Intruder:
    """A process with threads allowed on exclusive pCPUs of others.

    `last_there` are those that ran there last, which used `there_s` seconds of CPU time, wherever.
    """

    process: HostProcess
    cpus: CpuSet
    task: SeenTask
    last_there: int
    there_s: float


def node_of(state: State) -> remedies.Node:
    """Return what remedies depend on."""
    return remedies.Node(owners.free(state), os.path.exists(_V2))


def groups(
    state: State, about: Container[str] | None, ran_ms: Mapping[int, float]
) -> tuple[IntruderGroup, ...]:
    """Return them; those that used most time there first, as far as that can be known.

    `about` are the ids of the sandboxes whose pCPUs matter; None: of all. `ran_ms` is how long each
    process, by pid, ran there while that was measured.
    """
    found = (_looked_at(process, cpus) for process, cpus in who_report.intruders(state, about))
    return grouped([one for one in found if one is not None], node_of(state), ran_ms)


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
    intruders: Sequence[Intruder], node: remedies.Node, ran_ms: Mapping[int, float]
) -> tuple[IntruderGroup, ...]:
    """Return the processes by sandbox, pod, systemd unit or cgroup. Pure."""
    members: dict[str, list[Intruder]] = {}
    for one in intruders:
        members.setdefault(_name(one), []).append(one)
    every = (_group(name, several, node, ran_ms) for name, several in members.items())
    return tuple(
        sorted(every, key=lambda one: (-one.measured_ms, -one.there_s, -one.cpu_s, one.name))
    )


def _name(one: Intruder) -> str:
    place = place_of(one.task.cgroup)
    pod = one.process.pod or (f"pod {place.pod_uid}" if place.pod_uid else "")
    return pod or place.unit or f"cgroup {one.task.cgroup or 'unknown'}"


def _group(
    name: str, members: Sequence[Intruder], node: remedies.Node, ran_ms: Mapping[int, float]
) -> IntruderGroup:
    def used(one: Intruder) -> tuple[float, float, float]:
        return ran_ms.get(one.process.pid, 0.0), one.there_s, one.process.cpu_s or 0.0

    members = sorted(members, key=used, reverse=True)
    most = members[0]
    sandbox = most.process.sandbox
    kind = TaskClass.OTHER_SANDBOX if sandbox else TaskClass.USER
    remedy = remedies.of_task(most.task, kind, node, sandbox)
    pids = [str(one.process.pid) for one in members]
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
