"""What `prove` and `check` measure: who ran on exclusive pCPUs of others, and what guests felt."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from shlex import quote
from typing import Final

from msgspec import Struct
from msgspec.structs import astuple, replace

from kata_pin.base.counters import Measured, MeasuredExits
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.check import FOREIGN, Finding, Foreign, Measurement
from kata_pin.base.documents.measured import (
    ExitReason,
    GuestCommand,
    GuestLatency,
    HaltPolling,
    HostCause,
    ProveDocument,
    ProvedPcpu,
    RanTask,
    Refused,
    VcpuLatency,
    WatchDocument,
    WatchedPcpu,
)
from kata_pin.base.documents.state import Sandbox, State, Thread
from kata_pin.base.errors import HostError
from kata_pin.base.values import Method, TaskClass, Verdict, count
from kata_pin.cli.reports import owners, pcpus
from kata_pin.cli.reports.findings import NOTHING, Looked
from kata_pin.cli.reports.words import age
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.linux.recording import Asked, Progress, measure
from kata_pin.linux.switches import look_at
from kata_pin.placement import proof, proof_rows
from kata_pin.placement.owners import Known, Owner
from kata_pin.placement.proof import judge_counts
from kata_pin.placement.proof_rows import by_process
from kata_pin.placement.remedies import OURS, NodeConditions

# What guests feel, measured on the host, beside what the host did: `prove --guest`.

MOST: Final = 5
"""Reasons and causes of one vCPU that are listed."""


def vms(state: State, sandboxes: Collection[str]) -> tuple[int, ...]:
    """Return the processes of these sandboxes' VMs, where KVM runs them."""
    return tuple(
        one.vmm.pid
        for one in state.sandboxes
        if one.id in sandboxes and one.vmm is not None and one.vmm.kvm
    )


def vcpu_threads(state: State, sandboxes: Collection[str]) -> list[tuple[int, int]]:
    """Return process and thread of every vCPU of these sandboxes."""
    return [
        (thread.tgid, thread.tid)
        for one in state.sandboxes
        if one.id in sandboxes
        for thread in _vcpus(one)
    ]


def latencies(
    state: State, measured: Measured, rows: Iterable[ProvedPcpu], seconds: float
) -> Iterator[GuestLatency]:
    """Yield what each guest with exclusive pCPUs felt; `rows` are those pCPUs."""
    by_sandbox: dict[str, dict[int, ProvedPcpu]] = {}
    for row in rows:
        by_sandbox.setdefault(row.sandbox, {})[row.cpu] = row
    for sandbox in state.sandboxes:
        if sandbox.id not in by_sandbox:
            continue
        polling = _polling(sandbox, measured)
        yield GuestLatency(
            sandbox=sandbox.id,
            pod=sandbox.pod,
            vcpus=tuple(_vcpu(sandbox, measured, by_sandbox[sandbox.id])),
            halt_polling=polling,
            problems=tuple(_problems(sandbox, measured, polling)),
            commands=tuple(_commands(sandbox, seconds)),
        )


def _vcpus(sandbox: Sandbox) -> list[Thread]:
    threads = [one for one in sandbox.threads if one.role == "vcpu"]
    return sorted(threads, key=lambda one: (len(one.label), one.label))


def _vcpu(
    sandbox: Sandbox, measured: Measured, rows: Mapping[int, ProvedPcpu]
) -> Iterator[VcpuLatency]:
    guest_cpus = {one.tid: one.guest_cpu for one in sandbox.guest.vcpus} if sandbox.guest else {}
    names = {one.id: one.name for one in sandbox.containers}
    for thread in _vcpus(sandbox):
        place = pcpus.parse(thread.expected if thread.expected is not None else thread.affinity)
        row = rows.get(next(iter(place), -1)) if len(place) == 1 else None
        before, after = measured.times.get(thread.tid, (None, None))
        here = _switches(thread.tid, row, measured)
        outside = [one for one in measured.exits or () if one.tid == thread.tid]
        known = measured.exits is not None and row is not None
        yield VcpuLatency(
            vcpu=thread.label,
            tid=thread.tid,
            guest_cpu=guest_cpus.get(thread.tid),
            cpus=str(place),
            container=names.get(thread.container, ""),
            ran_ms=_ms(after.ran_ns - before.ran_ns) if before and after else None,
            steal_ms=_ms(after.waited_ns - before.waited_ns) if before and after else None,
            preempted=here[0] if here else None,
            longest_wait_ms=_ms(here[1]) if here else None,
            halts=sum(one.halts for one in outside) if known else None,
            exits=sum(one.times for one in outside) if known else None,
            outside_ms=_ms(sum(one.total_ns for one in outside)) if known else None,
            reasons=tuple(_reasons(outside))[:MOST] if known else (),
            causes=tuple(_causes(thread, row))[:MOST] if row else (),
        )


def _switches(tid: int, row: ProvedPcpu | None, measured: Measured) -> tuple[int, int] | None:
    """Return how often a thread with a pCPU for itself lost it, and the longest wait for it."""
    if row is None or measured.method is not Method.PERF:
        return None
    task = next((one for one in measured.cpus[row.cpu].tasks if one.tid == tid), None)
    return (task.preempted, task.longest_wait_ns) if task else (0, 0)


def _reasons(exits: Iterable[MeasuredExits]) -> Iterator[ExitReason]:
    """Yield why a vCPU was outside, the longest exit first."""
    for one in sorted(exits, key=lambda one: -one.longest_ns):
        if one.times:
            name = one.name or f"reason {one.reason}"
            yield ExitReason(name, one.times, _ms(one.total_ns), _ms(one.longest_ns), one.long)


def _causes(thread: Thread, row: ProvedPcpu) -> list[HostCause]:
    """Return what else ran on a vCPU's pCPU, longest first."""
    found = [
        HostCause(f"{one.label} (tid {one.tid})", one.here_ms)
        for one in row.own
        if one.tid != thread.tid and one.here_ms
    ]
    for task, _ in by_process(row.tasks):
        if task.total_ms:
            pid = f" (pid {task.pid})" if task.pid else ""
            found.append(HostCause(f"{task.comm or 'gone'}{pid}", task.total_ms))
    if row.interrupt_ms:
        found.append(HostCause("interrupts", row.interrupt_ms))
    return sorted(found, key=lambda one: -one.ran_ms)


def _polling(sandbox: Sandbox, measured: Measured) -> HaltPolling | None:
    pair = measured.kvm.get(sandbox.vmm.pid) if sandbox.vmm else None
    if pair is None:
        return None
    before, after = pair
    return HaltPolling(
        halts=after.halts - before.halts,
        polled_ms=_ms(after.polled_ns - before.polled_ns),
        wasted_ms=_ms(after.wasted_ns - before.wasted_ns),
        slept_ms=_ms(after.slept_ns - before.slept_ns),
    )


def _problems(sandbox: Sandbox, measured: Measured, polling: HaltPolling | None) -> Iterator[str]:
    """Yield what could not be measured, and why."""
    if sandbox.vmm is None:
        yield f"no VMM: {sandbox.vmm_problem}"
    elif not sandbox.vmm.kvm:
        yield "exits and halt polling unknown: the VM is emulated, without KVM"
    else:
        if measured.exits is None:
            yield f"exits unknown: {measured.no_exits}"
        if polling is None:
            yield f"halt polling unknown: {measured.no_kvm or 'the VM is gone'}"


def _commands(sandbox: Sandbox, seconds: float) -> Iterator[GuestCommand]:
    """Yield how to measure in each container that has exclusive pCPUs and guest CPUs of its own."""
    guest = sandbox.guest
    namespace, slash, pod = sandbox.pod.partition("/")
    exclusive = {one.id for one in sandbox.containers if one.exclusive}
    for one in guest.containers if guest else ():
        cpus = pcpus.parse(one.cpus)
        if one.id not in exclusive or not cpus:
            continue
        run = f"crictl exec -it {quote(one.id)} "
        if slash:
            run = f"kubectl exec -n {quote(namespace)} {quote(pod)} -c {quote(one.name)} -- "
        for program, words in _programs(cpus, max(1, round(seconds))).items():
            yield GuestCommand(one.name, program, f"{run}{program} {words}")


def _programs(cpus: CpuSet, seconds: int) -> dict[str, str]:
    """Return the arguments of the programs of rt-tests for some guest CPUs."""
    return {
        "cyclictest": f"-q -m -p 95 -i 200 -h 1000 -t {len(cpus)} -a {cpus} -D {seconds}",
        "oslat": f"-f 95 -c {cpus} -D {seconds}",
    }


def _ms(ns: int) -> float:
    return ns / 1e6


# `prove`: measures what runs on exclusive pCPUs, and says what that proves.
#
# The state document says who owns which pCPU and which threads are placed there. It is asked before
# and after: a pCPU that changed its owner meanwhile is unproved, and threads that were placed
# meanwhile are its owner's.

_V2: Final = "fs/cgroup/cgroup.controllers"


class ProofRequest(Struct, frozen=True):
    """What is to be proved: which sandboxes (None: all), how long, and what is accepted.

    `methods` are tried in this order. `guest`: what the guests feel is measured too.
    """

    about: Container[str] | None = None
    seconds: float = 60.0
    max_foreign_percent: float = 0.0
    irq: bool = False
    methods: tuple[Method, ...] = tuple(Method)
    guest: bool = False


Meter = Callable[[HostRoot, Asked, Progress], Measured]


def prove(
    state_now: Callable[[], State],
    wanted: ProofRequest,
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
    threads = [
        (thread.tgid, thread.tid)
        for one in before.sandboxes
        for thread in one.threads
        if thread.tid in mine
    ]
    guests = {one.sandbox for one in owned} if wanted.guest else set()
    threads += vcpu_threads(before, guests)
    measured = Measured(Method.PERF, {})
    if cpus:
        asked = Asked(
            cpus,
            wanted.seconds,
            tuple(dict.fromkeys(threads)),
            wanted.methods,
            wanted.irq,
            owners.free(before),
            vms(before, guests),
        )
        measured = meter(root, asked, progress)
    after = state_now()
    node = NodeConditions(owners.free(after), os.path.exists(root.sys(_V2)))
    rows = _rows(measured, owned, (before, after), wanted, node)
    verdict = proof.overall(Verdict(row.verdict) for row in rows)
    return ProveDocument(
        time=after.time,
        daemon=after.daemon,
        hostname=after.node.hostname,
        kernel=after.node.kernel,
        verdict=verdict,
        reason=_reason(rows) or _nothing(before, wanted),
        method=measured.method,
        refused=tuple(Refused(method, reason) for method, reason in measured.refused),
        asked_s=wanted.seconds,
        max_foreign_percent=wanted.max_foreign_percent,
        parts=measured.parts,
        reader_ms=measured.reader_ns / 1e6,
        pcpus=tuple(rows),
        guests=tuple(latencies(before, measured, rows, wanted.seconds) if wanted.guest else ()),
    )


def _rows(
    measured: Measured,
    owned: Iterable[Owner],
    states: tuple[State, State],
    wanted: ProofRequest,
    node: NodeConditions,
) -> list[ProvedPcpu]:
    """Return the object of each pCPU."""
    before, after = states
    now = {(one.cpu, one.sandbox): one for one in owners.owners(after, wanted.about)}
    known = _together(owners.known(before), owners.known(after))
    rows = []
    for owner in owned:
        later = now.get((owner.cpu, owner.sandbox))
        both = replace(owner, own={**owner.own, **(later.own if later else {})})
        if measured.method in proof.NAMES_TASKS:
            judged = proof.judge(measured, both, known, wanted.max_foreign_percent)
            row = proof_rows.pcpu(judged, both, measured, known, node)
        else:
            counts = judge_counts(measured, owner, wanted.max_foreign_percent)
            row = proof_rows.counted(counts, both, measured)
        proved = row.verdict == Verdict.PROVED.value
        if proved and later is None:
            row = _unproved(row, "it did not stay exclusive to its sandbox")
        elif proved and wanted.irq and measured.interrupts is None:
            row = _unproved(row, f"interrupts were not measured: {measured.no_interrupts}")
        rows.append(row)
    return rows


def _nothing(state: State, wanted: ProofRequest) -> str:
    """Return why there is nothing to prove."""
    about = wanted.about
    pods = [one.pod for one in state.sandboxes if about is None or one.id in about]
    if not pods:
        return "no sandboxes"
    where = pods[0] if len(pods) == 1 else count(len(pods), "sandbox", "sandboxes")
    return f"no exclusive pCPUs in {where}"


def _unproved(row: ProvedPcpu, reason: str) -> ProvedPcpu:
    return replace(row, verdict=Verdict.UNPROVED, reason=reason)


def _together(first: Known, second: Known) -> Known:
    """Return what is known in one or the other."""
    return Known(
        *({**one, **other} for one, other in zip(astuple(first), astuple(second), strict=True))
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


# What `check` measures: who ran on exclusive pCPUs of others while it looked.
#
# `prove` has the whole answer; here user processes and other sandboxes count, which fail, and of
# the kernel's threads only a note is left. What the daemon's watch saw counts too while who it was
# may still run there, and alone where this user may not measure.

_METHODS: Final = (Method.PERF, Method.HIST)
"""Counters alone tell less than the daemon's watch has seen."""

NAMED: Final = 3
"""Most processes of one pCPU that a finding names."""

MayRun = Callable[[RanTask, int], bool]

_FAILS: Final = {TaskClass.USER.value, TaskClass.OTHER_SANDBOX.value}
_UNSEEN: Final = {TaskClass.UNKNOWN.value}
_NOTED: Final = {TaskClass.UNBOUND_KERNEL.value}


def look(
    state: State,
    again: Callable[[], State],
    wanted: ProofRequest,
) -> Looked:
    """Measure the exclusive pCPUs; `again` returns the state document afterwards."""
    if wanted.seconds <= 0 or not owners.owners(state, wanted.about):
        return NOTHING
    wanted, states = replace(wanted, methods=_METHODS), iter([state])
    try:
        return judged(prove(lambda: next(states, None) or again(), wanted))
    except HostError as error:
        return Looked(unknown=(f"exclusive pCPUs were not measured: {error}",))


def with_watch(
    looked: Looked, watch: WatchDocument, owned: Iterable[Owner], may_run: MayRun
) -> Looked:
    """Return what was measured together with what the daemon saw of the same pCPUs.

    `may_run` says whether a task may still run on a pCPU.
    """
    pairs = {(one.cpu, one.sandbox) for one in owned}
    seen = [one for one in watch.pcpus if (one.cpu, one.sandbox) in pairs]
    named = {one.cpus for one in looked.findings if one.fails}
    since = {(str(one.cpu), one.sandbox): one.episode_s for one in seen}
    now = [
        replace(one, since_s=since.get((one.cpus, one.sandbox))) if one.fails else one
        for one in looked.findings
    ]
    findings = [
        finding
        for one in seen
        if one.episode_s is not None and str(one.cpu) not in named
        for finding in _episode(one, watch.max_foreign_percent, looked, may_run)
    ]
    unknown, measured = looked.unknown, looked.measured
    counted = {(one.cpu, one.sandbox) for one in seen if one.over_s is not None}
    if measured is None and pairs and counted >= pairs:
        cpus = CpuSet(cpu for cpu, _ in pairs)
        over_s = min(one.over_s or 0.0 for one in seen)
        measured = Measurement(str(cpus), over_s, "watch", watch.max_foreign_percent)
        unknown = tuple(_unseen(seen, watch.max_foreign_percent))
    return replace(looked, findings=(*now, *findings), unknown=unknown, measured=measured)


def _unseen(seen: Iterable[WatchedPcpu], most_percent: float) -> Iterator[str]:
    """Yield the pCPUs of which the daemon cannot tell whether others had them for too long."""
    for one in seen:
        others = one.others_percent or 0.0
        if one.episode_s is None and one.window is None and others > most_percent:
            yield (
                f"others ran on pCPU {one.cpu} of {one.pod} for at most {others:.3g} % of "
                f"{one.over_s or 0.0:.1f} s; the daemon has not recorded who"
            )


def may_still_run(task: RanTask, cpu: int) -> bool:
    """Whether a task that ran on a pCPU lives and may run there now."""
    now = look_at(HOST, task.tid, task.pid)
    return now is not None and now.comm == task.comm and cpu in (now.affinity or ())


def _episode(
    one: WatchedPcpu, most_percent: float, looked: Looked, may_run: MayRun
) -> Iterator[Finding]:
    """Yield what is to be said of foreign tasks that the daemon saw on a pCPU and that go on."""
    since = f"; the daemon has seen this for {age(one.episode_s)}"
    row = one.window
    if row is None:
        text = (
            f"others ran on pCPU {one.cpu} of {one.pod} for {one.others_percent or 0.0:.3g} % of "
            f"{one.over_s or 0.0:.1f} s; who it was is not recorded{since}"
        )
        seen = Foreign(one.cpu, one.others_percent or 0.0, (), one.age_s)
        fails = looked.measured is None
        yield FOREIGN.found(
            *(one.sandbox, str(one.cpu), text),
            fails=fails,
            foreign=seen,
            owner=one.pod,
            who="not recorded",
            since_s=one.episode_s,
        )
        return
    left = tuple(task for task in row.tasks if may_run(task, one.cpu))
    for finding in _findings(replace(row, tasks=left), most_percent):
        if finding.fails and finding.foreign is not None and left:
            seen = replace(finding.foreign, seen_s=one.window_age_s)
            text = finding.text + since
            yield replace(finding, text=text, foreign=seen, since_s=one.episode_s)


def judged(found: ProveDocument) -> Looked:
    """Return what a measurement means for `check`."""
    cpus = CpuSet(row.cpu for row in found.pcpus)
    ran: dict[int, float] = {}
    for task in (task for row in found.pcpus for task in row.tasks):
        ran[task.pid] = ran.get(task.pid, 0.0) + (task.total_ms or 0.0)
    return Looked(
        tuple(one for row in found.pcpus for one in _findings(row, found.max_foreign_percent)),
        tuple(one for row in found.pcpus for one in _unknown(row, found.max_foreign_percent)),
        ran,
        Measurement(str(cpus), found.asked_s, found.method.value, found.max_foreign_percent),
    )


def _findings(row: ProvedPcpu, most_percent: float) -> Iterator[Finding]:
    for classes, fails in ((_FAILS, True), (_NOTED, False)):
        tasks = [one for one in row.tasks if one.task_class in classes]
        percent = _percent(tasks, row)
        if percent > most_percent:
            yield _finding(row, percent, tasks, fails=fails)
    if not row.tasks and row.verdict == "violated":  # the method names no tasks
        yield _finding(row, row.foreign_percent or 0.0, [], fails=True)


def _unknown(row: ProvedPcpu, most_percent: float) -> Iterator[str]:
    if row.verdict == "unproved":
        yield f"pCPU {row.cpu} of {row.pod}: measurement incomplete: {row.reason}"
    unseen = _percent([one for one in row.tasks if one.task_class in _UNSEEN], row)
    if unseen > most_percent:
        yield (
            f"tasks that ended before they could be identified ran on pCPU {row.cpu} of {row.pod} "
            f"for {unseen:.3g} % of the time"
        )


def _percent(tasks: Iterable[RanTask], row: ProvedPcpu) -> float:
    """Return the share of the window that some tasks had."""
    return sum(one.total_ms or 0.0 for one in tasks) / (10 * row.window_s) if row.window_s else 0.0


def _finding(row: ProvedPcpu, percent: float, tasks: list[RanTask], *, fails: bool) -> Finding:
    tasks.sort(key=lambda one: -(one.total_ms or 0.0))
    programs = by_process(tasks)
    named = [_named(one) for one, _ in programs[:NAMED]]
    if len(programs) > NAMED:
        named.append(f"{len(programs) - NAMED} more")
    text = f"others ran on pCPU {row.cpu} of {row.pod} for {percent:.3g} % of {row.window_s:.1f} s"
    text += f": {', '.join(named)}" if named else f" ({row.reason})"
    remedy = command = ""
    if programs:
        remedy, command = programs[0][0].remedy, programs[0][0].command
        text += f"; {remedy}"
        text += f"; run: {command}" if command else ""
    return FOREIGN.found(
        *(row.sandbox, str(row.cpu), text),
        fails=fails,
        foreign=Foreign(row.cpu, round(percent, 4), tuple(tasks)),
        owner=row.pod,
        who=", ".join(named) or row.reason,
        remedy=remedy,
        command=command,
    )


def _named(task: RanTask) -> str:
    owner = task.pod or ("kata-pin itself" if task.remedy == OURS.text else task.unit)
    whose = f" of {owner}" if owner else ""
    who = f" (pid {task.pid}{whose})" if task.pid else ""
    time = "" if task.total_ms is None else f" {task.total_ms:.1f} ms"
    return f"{task.comm}{who}{time}"
