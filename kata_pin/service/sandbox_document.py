"""One sandbox and its guest as the state document shows them (base/documents/state.py).

Made by the daemon, or by the command line itself when the daemon is down (D19).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from msgspec import Struct

from kata_pin.base import placement, sandbox
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.answers import AppliedSandbox, Result
from kata_pin.base.documents.document import Note
from kata_pin.base.documents.state import (
    Cache,
    Container,
    CpusetReport,
    Guest,
    GuestContainer,
    GuestLink,
    GuestLinks,
    GuestVcpu,
    Memory,
    QuietSandbox,
    Sandbox,
    Thread,
    Vmm,
    Writer,
)
from kata_pin.base.placement import sandbox_state, thread_state
from kata_pin.base.sandbox import GuestCpuset, VcpuLink
from kata_pin.base.values import (
    ContainerState,
    NoteLevel,
    Provenance,
    SandboxState,
    ThreadRole,
    ThreadState,
)
from kata_pin.guest.cpus import GuestPlan, GuestView, Sent
from kata_pin.placement.masks import believed, why

START_S: Final = 60.0
"""A container that was not started so long after its creation may never be: that takes seconds."""

UNKNOWN: Final = "unknown"
"""The state of a container that may run or not; its cpuset counts still."""


class KnownSandbox(Struct, frozen=True):
    """Everything known about one sandbox at the time of the document.

    `checked_s` is the age of the last pass or audit in seconds, None if there was none.
    `states` are those of all threads, `threads` may be left out. `guest` is None without a VMM.
    """

    sandbox: sandbox.Sandbox
    report: placement.Report | None
    states: tuple[str, ...] = ()
    threads: tuple[Thread, ...] = ()
    checked_s: float | None = None
    problem: str = ""
    released: bool = False
    backed_off: frozenset[int] = frozenset()
    guest: Guest | None = None
    writers: Sequence[Writer] = ()
    cache: Cache | None = None
    memory: Memory | None = None
    more_notes: Sequence[placement.Note] = ()
    quiet: QuietSandbox | None = None

    @property
    def placement(self) -> placement.Placement | None:
        """The decision of the last pass."""
        return None if self.report is None else self.report.placement


def sandbox_report(facts: KnownSandbox, conflicts: Sequence[placement.Note] = ()) -> Sandbox:
    """Return the report; `conflicts` are notes about exclusive pCPUs that others claim too."""
    known, report, decided = facts.sandbox, facts.report, facts.placement
    mask = decided.mask if decided else None
    claims = () if known.vmm is None else known.vmm.refused
    found = [
        *conflicts,
        *map(_claim, claims),
        *(report.notes if report else ()),
        *(decided.notes if decided else ()),
        *facts.more_notes,
    ]
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return Sandbox(
        id=known.id,
        pod=known.pod,
        handler=known.handler,
        state=_state(facts, conflict=bool(conflicts)),
        mask=cpus(mask.mask if mask else None),
        mask_origin=mask.origin if mask else "",
        exclusive=str(mask.exclusive) if mask else "",
        shared=str(mask.shared) if mask else "",
        checked_s=rounded(facts.checked_s),
        duration_ms=_duration_ms(report),
        containers=tuple(
            _container(
                one, mask.claims if mask else (), now_ns, doubt=_doubt(one, known.vmm, now_ns)
            )
            for one in known.containers
        ),
        vmm=_vmm(known.vmm),
        vmm_problem=facts.problem,
        guest=facts.guest,
        threads=facts.threads,
        writers=tuple(facts.writers),
        cache=facts.cache,
        memory=facts.memory,
        notes=notes(found),
        pod_uid=known.pod_uid,
        quiet=facts.quiet,
    )


def _claim(refused: str) -> placement.Note:
    text = f"another process claims to be the VMM and is not believed: {refused}"
    return placement.Note("vmm-claimed", text, NoteLevel.WARNING)


def applied(every: Iterable[KnownSandbox]) -> tuple[AppliedSandbox, ...]:
    """Return what the last pass over each sandbox set."""
    return tuple(_applied(facts) for facts in every)


def _applied(facts: KnownSandbox) -> AppliedSandbox:
    report = facts.report
    return AppliedSandbox(
        id=facts.sandbox.id,
        pod=facts.sandbox.pod,
        state=_state(facts),
        vmm_problem=facts.problem,
        threads=len(facts.states),
        duration_ms=_duration_ms(report),
        results=tuple(_result(one) for one in report.results) if report else (),
        notes=notes(report.notes) if report else (),
    )


def _result(result: placement.ActionResult) -> Result:
    return Result(
        tid=result.action.key.tid,
        before=str(result.action.before),
        target=str(result.action.target),
        after=cpus(result.after),
        outcome=result.outcome,
        reason=result.action.reason,
    )


def _state(facts: KnownSandbox, *, conflict: bool = False) -> SandboxState:
    decided = facts.placement
    return sandbox_state(
        facts.states,
        vmm=facts.sandbox.vmm is not None,
        mask=decided.mask.mask if decided is not None else None,
        released=facts.released,
        shared=conflict,
    )


def _duration_ms(report: placement.Report | None) -> float | None:
    return round(report.duration_ns / 1e6, 3) if report else None


def _doubt(container: sandbox.Container, vmm: sandbox.Vmm | None, now_ns: int) -> str:
    """Return why it is unknown whether a recorded container runs, empty if it is known."""
    if not container.state.counts:
        return ""
    if vmm is not None and vmm.orphan:
        return "its shim has ended, so nothing reports what it does"
    created = container.state is ContainerState.CREATED
    if created and _age_s(container.recorded_ns, now_ns) > START_S:
        return "created, and no start was reported: creation or start may have failed"
    return ""


def _container(
    container: sandbox.Container, claims: Iterable[placement.Claim], now_ns: int, *, doubt: str
) -> Container:
    claim = next((one for one in claims if one.container_id == container.id), None)
    used = believed(container.reported)
    return Container(
        id=container.id,
        name=container.title,
        kind=container.kind,
        state=UNKNOWN if doubt else container.state.value,
        cpus=cpus(container.cpus),
        mems=container.mems,
        exclusive=str(claim.exclusive) if claim else "",
        provenance=claim.provenance if claim else Provenance.NONE,
        reason=claim.reason if claim else "",
        cpusets=tuple(
            CpusetReport(
                source=one.source,
                cpus=cpus(one.cpus),
                age_s=_age_s(one.recorded_ns, now_ns) if one.recorded_ns else 0.0,
                used=one is used,
            )
            for one in container.reported
        ),
        cpusets_reason=why(container.reported) if container.reported else "",
        source=container.source,
        recorded_s=_age_s(container.recorded_ns, now_ns),
        quota_us=container.quota_us,
        period_us=container.period_us,
        shares=container.shares,
        bundle=container.bundle,
        note="; ".join(part for part in (doubt, container.note) if part),
    )


def _vmm(vmm: sandbox.Vmm | None) -> Vmm | None:
    if vmm is None:
        return None
    return Vmm(
        kind=vmm.kind,
        pid=vmm.process.pid,
        starttime=vmm.process.starttime,
        exe=vmm.exe,
        exe_replaced=vmm.exe_deleted,
        confirmed_by=vmm.witness,
        kvm=vmm.kvm,
        boot_vcpus=vmm.guest.boot,
        max_vcpus=vmm.guest.maximum,
        orphan=vmm.orphan,
        guest_cid=vmm.guest_cid,
        runtime=vmm.runtime,
    )


def thread_reports(
    report: placement.Report | None, *, released: bool, backed_off: Collection[int] = ()
) -> tuple[Thread, ...]:
    """Return the threads as a pass found them; another writer moves the tids `backed_off`."""
    if report is None:
        return ()
    desired = report.placement.desired if report.placement is not None else {}
    return tuple(
        _thread(
            one,
            found := desired.get(one.task.key),
            thread_state(one, found, released=released, backed_off=backed_off),
        )
        for one in report.threads
    )


def _thread(found: sandbox.Thread, desired: placement.Desired | None, state: ThreadState) -> Thread:
    task, role = found.task, found.role
    return Thread(
        tid=task.key.tid,
        tgid=task.key.tgid,
        starttime=task.key.starttime,
        comm=task.comm,
        role=role.role,
        label=found.label,
        source=role.source,
        vcpu=role.vcpu if role.role is ThreadRole.VCPU else None,
        apic_id=role.apic_id,
        iothread=role.iothread,
        conflict=role.conflict,
        desired=cpus(desired.wanted if desired else None),
        expected=cpus(desired.applied if desired else None),
        fallback=desired.step if desired else "",
        reason=desired.reason if desired else "not pinned by kata-pin",
        paired=bool(desired and desired.paired),
        container=desired.container_id if desired else "",
        affinity=str(task.affinity),
        last_cpu=task.last_cpu,
        cpu_ticks=task.cpu_ticks,
        cgroup=task.cgroup,
        cpuset=str(task.cpuset),
        state=state,
    )


def notes(found: Iterable[placement.Note]) -> tuple[Note, ...]:
    """Return notes as documents have them, each once."""
    return tuple(Note(one.code, one.text, one.level) for one in dict.fromkeys(found))


def cpus(found: CpuSet | None) -> str | None:
    """Return a CPU set as documents have it."""
    return None if found is None else str(found)


def rounded(seconds: float | None) -> float | None:
    """Return an age in seconds, never negative, to the millisecond."""
    return None if seconds is None else round(max(0.0, seconds), 3)


def _age_s(then_ns: int, now_ns: int) -> float:
    return round(max(0, now_ns - then_ns) / 1e9, 3)


def guest_report(
    view: GuestView, known: sandbox.Sandbox, vcpus: tuple[GuestVcpu, ...] = ()
) -> Guest:
    """Return the report with these vCPUs."""
    names = {one.id: one.title for one in known.containers}
    found = view.plan.map
    return Guest(
        state=view.state,
        detail=view.detail,
        answered_s=rounded(view.asked_s),
        kernel=found.facts.release,
        kernel_source=found.facts.source,
        hotplugged=found.hotplugged,
        vcpus=vcpus,
        containers=tuple(
            _guest_container(
                one, names.get(one.container_id, one.container_id), view.sent.get(one.container_id)
            )
            for one in view.plan.cpusets
        ),
    )


def vcpu_reports(plan: GuestPlan) -> tuple[GuestVcpu, ...]:
    """Return the vCPUs of a plan."""
    return tuple(_vcpu(one) for one in plan.map.links)


def _vcpu(one: VcpuLink) -> GuestVcpu:
    weakest, links = one.weakest, (one.thread_link, one.apic_link, one.guest_link)
    return GuestVcpu(
        tid=one.key.tid,
        vcpu=one.index,
        apic_id=one.apic_id,
        guest_cpu=one.guest_cpu,
        state=weakest.state,
        source=weakest.source,
        links=GuestLinks(*(GuestLink(link.state, link.source) for link in links)),
        cpus=str(one.cpus),
        paired=one.paired,
        container=one.container_id,
    )


def _guest_container(one: GuestCpuset, name: str, sent: Sent | None) -> GuestContainer:
    return GuestContainer(
        id=one.container_id,
        name=name,
        cpus=cpus(one.cpus),
        owned=one.owned,
        reason=one.reason,
        applied=None if sent is None else str(sent.cpus),
        proof=None if sent is None else sent.proof,
        detail="" if sent is None else sent.detail,
    )
