"""What documents say of a sandbox, from what is known of all."""

from __future__ import annotations

import time

from msgspec.structs import replace

from kata_pin.base import sandbox
from kata_pin.base.documents.document import Daemon
from kata_pin.base.documents.state import Sandbox
from kata_pin.base.placement import Report
from kata_pin.base.sandbox import Container
from kata_pin.base.values import ContainerState, Mode
from kata_pin.service.documents import conflict_notes, state_report, with_sandboxes
from kata_pin.service.sandbox_document import KnownSandbox, thread_reports
from tests.support import world
from tests.support.at_once import place


def _facts(sandbox_id: str, container: Container, *, released: bool = False) -> KnownSandbox:
    """Return the facts of a sandbox with one vCPU that nobody has moved yet."""
    threads = world.vcpus(0)
    known = sandbox.Sandbox(sandbox_id, (container,), world.sandbox().vmm)
    report = Report(sandbox_id, tuple(threads), place(known, threads, world.node()))
    rows = thread_reports(report, released=released)
    return KnownSandbox(known, report, tuple(one.state for one in rows), rows, released=released)


def _shown(*facts: KnownSandbox) -> dict[str, Sandbox]:
    base = state_report(node=world.node(), mode=Mode.ACT, daemon=Daemon(running=True))
    placements = {one.sandbox.id: one.placement for one in facts if one.placement is not None}
    document = with_sandboxes(base, facts, conflict_notes(placements, lambda one: one))
    return {one.id: one for one in document.sandboxes}


def test_an_exclusive_pcpu_of_two_sandboxes_is_a_conflict() -> None:
    """Both are shown as in conflict and say with whom; a third one is not."""
    shown = _shown(
        _facts("a", world.exclusive("x", "4-5")),
        _facts("b", world.exclusive("x", "5-6")),
        _facts("c", world.exclusive("x", "7")),
    )
    assert [shown[one].state for one in "abc"] == ["conflict", "conflict", "drift"]
    told = [note.text for note in shown["a"].notes if note.code == "conflict-exclusive"]
    assert told == ["exclusive pCPU 5 is also claimed by b"]


def test_threads_of_a_released_sandbox_do_not_drift() -> None:
    """Where an operator gave the pins back, no thread is off its place."""
    shown = _shown(_facts("a", world.exclusive("x", "4"), released=True))["a"]
    assert (shown.state, [t.state for t in shown.threads]) == ("released", ["released"])


def test_whether_a_container_runs_is_unknown() -> None:
    """Its shim is dead, or it was created long ago and no start was ever reported; with why."""
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    late_ns = now_ns - 61_000_000_000
    known = world.sandbox()
    assert known.vmm is not None
    cases = (
        (ContainerState.CREATED, now_ns, False, "created"),
        (ContainerState.CREATED, late_ns, False, "unknown"),
        (ContainerState.RUNNING, late_ns, False, "running"),
        (ContainerState.RUNNING, now_ns, True, "unknown"),
        (ContainerState.STOPPED, late_ns, True, "stopped"),
    )
    for state, recorded_ns, orphan, shown in cases:
        container = replace(world.exclusive("x", "4"), state=state, recorded_ns=recorded_ns)
        found = sandbox.Sandbox("a", (container,), replace(known.vmm, orphan=orphan))
        (report,) = _shown(KnownSandbox(found, None))["a"].containers
        assert (report.state, bool(report.note)) == (shown, shown == "unknown")
