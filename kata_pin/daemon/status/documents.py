"""The state document: what the command line shows, as plain JSON values (docs/json.md).

Made by the daemon, or by the command line itself when the daemon is down (DESIGN D19). CPU sets
are Linux cpu lists, ages are seconds.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kata_pin.daemon.guests.status import GuestView, guest_document
from kata_pin.daemon.reconcile.other_writers import Writer
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node import Node
from kata_pin.model.pass_outcome import sandbox_state, thread_state
from kata_pin.model.placement import (
    ActionResult,
    Claim,
    Note,
    NoteLevel,
    Placement,
    Report,
)
from kata_pin.model.sandbox import Container, ReportedCpuset, Sandbox, Vmm
from kata_pin.model.thread import Thread, ThreadRole
from kata_pin.policy.placement.conflicts import conflicts
from kata_pin.policy.placement.precedence import believed, why

VERSION: Final = 1

Json = dict[str, Any]


@dataclass(frozen=True)
class SandboxFacts:
    """Everything known about one sandbox at the time the document is made.

    `checked_s` is the age of the last pass or audit in seconds, None if there was none.
    `backed_off` are the tids whose affinity another writer keeps changing, `writers` who else sets
    affinities.
    `guest` is None without a VMM.
    """

    sandbox: Sandbox
    report: Report | None
    checked_s: float | None = None
    problem: str = ""
    released: bool = False
    conflicts: Sequence[Note] = ()
    backed_off: frozenset[int] = frozenset()
    guest: GuestView | None = None
    writers: Sequence[Writer] = ()


def state_document(
    *,
    node: Node,
    mode: str,
    daemon: Mapping[str, object],
    sandboxes: Iterable[SandboxFacts],
    notes: Iterable[Note] = (),
    allocation: Json | None = None,
) -> Json:
    """Return the whole document."""
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return {
        "version": VERSION,
        "kind": "state",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "daemon": dict(daemon),
        "node": _node(node, mode),
        "sandboxes": [_sandbox(facts, now_ns) for facts in _with_conflicts(sandboxes)],
        "allocation": allocation,
        "notes": [_note(note) for note in notes],
    }


def _with_conflicts(sandboxes: Iterable[SandboxFacts]) -> list[SandboxFacts]:
    """Add to each sandbox what others claim of its exclusive pCPUs: it takes all to see that."""
    every = {facts.sandbox.id: facts for facts in sandboxes}
    placements = {
        sandbox_id: facts.report.placement
        for sandbox_id, facts in every.items()
        if facts.report is not None and facts.report.placement is not None
    }
    for conflict in conflicts(placements):
        pods = {one: every[one].sandbox.pod for one in conflict.sandboxes}
        for sandbox_id in conflict.sandboxes:
            others = ", ".join(pod for one, pod in pods.items() if one != sandbox_id)
            text = f"the exclusive pCPUs {conflict.cpus} are claimed by {others} too"
            note = Note("conflict-exclusive", text, NoteLevel.WARNING)
            facts = every[sandbox_id]
            every[sandbox_id] = replace(facts, conflicts=(*facts.conflicts, note))
    return list(every.values())


def _node(node: Node, mode: str) -> Json:
    topology = node.topology
    kubelet = node.kubelet
    return {
        "hostname": socket.gethostname(),
        "kernel": os.uname().release,
        "online": str(topology.online),
        "present": str(topology.present),
        "isolated": str(topology.isolated),
        "nohz_full": str(topology.nohz_full),
        "cpus": [
            {
                "cpu": cpu.cpu,
                "node": cpu.node,
                "package": cpu.package,
                "llc": cpu.llc,
                "core": cpu.core,
                "thread": cpu.thread,
                "kind": cpu.kind,
            }
            for cpu in topology.cpus
        ],
        "kubelet": (
            None if kubelet is None else {"policy": kubelet.policy, "default": str(kubelet.default)}
        ),
        "live_threads": node.live_threads,
        "mode": mode,
    }


def _sandbox(facts: SandboxFacts, now_ns: int) -> Json:
    sandbox, report = facts.sandbox, facts.report
    placement = report.placement if report else None
    mask = placement.mask if placement else None
    threads = [_thread(t, placement, facts) for t in report.threads] if report else []
    notes = [*facts.conflicts, *(report.notes if report else ())]
    if placement is not None:
        notes.extend(placement.notes)
    return {
        "id": sandbox.id,
        "pod": sandbox.pod,
        "handler": sandbox.handler,
        "state": _state(facts, placement, threads),
        "mask": _cpus(mask.mask if mask else None),
        "mask_origin": mask.origin if mask else "",
        "exclusive": str(mask.exclusive) if mask else "",
        "shared": str(mask.shared) if mask else "",
        "checked_s": _rounded(facts.checked_s),
        "duration_ms": round(report.duration_ns / 1e6, 3) if report else None,
        "containers": [
            _container(c, mask.claims if mask else (), now_ns) for c in sandbox.containers
        ],
        "vmm": _vmm(sandbox.vmm),
        "vmm_problem": facts.problem,
        "guest": guest_document(facts.guest, sandbox),
        "threads": threads,
        "writers": [writer.document for writer in facts.writers],
        "notes": [_note(note) for note in dict.fromkeys(notes)],
    }


def _state(facts: SandboxFacts, placement: Placement | None, threads: Sequence[Json]) -> str:
    return sandbox_state(
        [thread["state"] for thread in threads],
        vmm=facts.sandbox.vmm is not None,
        mask=placement.mask.mask if placement is not None else None,
        released=facts.released,
        shared=bool(facts.conflicts),
    )


def _container(container: Container, claims: Iterable[Claim], now_ns: int) -> Json:
    claim = next((c for c in claims if c.container_id == container.id), None)
    return {
        "id": container.id,
        "name": container.title,
        "kind": container.kind.value,
        "state": container.state.value,
        "cpus": _cpus(container.cpus),
        "mems": container.mems,
        "exclusive": str(claim.exclusive) if claim else "",
        "provenance": claim.provenance.value if claim else "none",
        "reason": claim.reason if claim else "",
        "told": [_told(one, container, now_ns) for one in container.reported],
        "told_reason": why(container.reported) if container.reported else "",
        "source": container.source,
        "recorded_s": _rounded((now_ns - container.recorded_ns) / 1e9),
        "quota_us": container.quota_us,
        "period_us": container.period_us,
        "shares": container.shares,
        "bundle": container.bundle,
        "note": container.note,
    }


def _told(told: ReportedCpuset, container: Container, now_ns: int) -> Json:
    return {
        "source": told.source.value,
        "cpus": _cpus(told.cpus),
        "age_s": _rounded((now_ns - told.recorded_ns) / 1e9) if told.recorded_ns else 0.0,
        "believed": told is believed(container.reported),
    }


def _vmm(vmm: Vmm | None) -> Json | None:
    if vmm is None:
        return None
    return {
        "kind": vmm.kind,
        "pid": vmm.process.pid,
        "starttime": vmm.process.starttime,
        "exe": vmm.exe,
        "exe_deleted": vmm.exe_deleted,
        "witness": vmm.witness,
        "kvm": vmm.kvm,
        "boot_vcpus": vmm.guest.boot,
        "max_vcpus": vmm.guest.maximum,
        "orphan": vmm.orphan,
        "guest_cid": vmm.guest_cid,
    }


def _thread(thread: Thread, placement: Placement | None, facts: SandboxFacts) -> Json:
    task, role = thread.task, thread.role
    desired = placement.desired.get(task.key) if placement else None
    return {
        "tid": task.key.tid,
        "tgid": task.key.tgid,
        "starttime": task.key.starttime,
        "comm": task.comm,
        "role": role.role.value,
        "label": thread.label,
        "source": role.source.value,
        "vcpu": role.vcpu if role.role is ThreadRole.VCPU else None,
        "apic_id": role.apic_id,
        "iothread": role.iothread,
        "conflict": role.conflict,
        "wanted": _cpus(desired.wanted if desired else None),
        "applied": _cpus(desired.applied if desired else None),
        "step": desired.step if desired else "",
        "reason": desired.reason if desired else "left alone",
        "paired": bool(desired and desired.paired),
        "container": desired.container_id if desired else "",
        "observed": str(task.affinity),
        "last_cpu": task.last_cpu,
        "cpu_ticks": task.cpu_ticks,
        "cgroup": task.cgroup,
        "cpuset": str(task.cpuset),
        "state": thread_state(
            thread, desired, released=facts.released, backed_off=facts.backed_off
        ),
    }


def _note(note: Note) -> Json:
    return {"code": note.code, "text": note.text, "level": note.level.value}


def _cpus(cpus: CpuSet | None) -> str | None:
    return None if cpus is None else str(cpus)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds), 3)


def applied_document(verb: str, sandboxes: Iterable[SandboxFacts]) -> Json:
    """Return what was just set, for `pin`, `unpin` and `reconcile` (the document's `kind`)."""
    return {
        "version": VERSION,
        "kind": verb,
        "sandboxes": [_applied(facts) for facts in sandboxes],
    }


def _applied(facts: SandboxFacts) -> Json:
    report = facts.report
    placement = report.placement if report else None
    threads = [_thread(t, placement, facts) for t in report.threads] if report else []
    return {
        "id": facts.sandbox.id,
        "pod": facts.sandbox.pod,
        "state": _state(facts, placement, threads),
        "vmm_problem": facts.problem,
        "threads": len(threads),
        "duration_ms": round(report.duration_ns / 1e6, 3) if report else None,
        "results": [_result(result) for result in report.results] if report else [],
        "notes": [_note(note) for note in report.notes] if report else [],
    }


def _result(result: ActionResult) -> Json:
    return {
        "tid": result.action.key.tid,
        "before": str(result.action.before),
        "target": str(result.action.target),
        "after": _cpus(result.after),
        "outcome": result.outcome.value,
        "reason": result.action.reason,
    }


def explanation_document(sandbox_id: str, lines: Sequence[str]) -> Json:
    """Return an explanation: plain lines, sections without indentation."""
    return {"version": VERSION, "kind": "explain", "sandbox": sandbox_id, "lines": list(lines)}
