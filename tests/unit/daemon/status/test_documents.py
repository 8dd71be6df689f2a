"""What documents say of a sandbox, from what is known of all."""

from __future__ import annotations

from kata_pin.daemon.status.documents import Json, SandboxFacts, state_document
from kata_pin.model.placement import Report
from kata_pin.model.sandbox import Container, Sandbox
from kata_pin.policy.placement.place import place
from tests.support import world


def _facts(sandbox_id: str, container: Container, *, released: bool = False) -> SandboxFacts:
    """Return the facts of a sandbox with one vCPU that nobody has moved yet."""
    threads = world.vcpus(0)
    sandbox = Sandbox(sandbox_id, (container,), world.sandbox().vmm)
    report = Report(sandbox_id, tuple(threads), place(sandbox, threads, world.node()))
    return SandboxFacts(sandbox, report, released=released)


def _shown(*facts: SandboxFacts) -> dict[str, Json]:
    document = state_document(node=world.node(), mode="act", daemon={}, sandboxes=facts)
    return {one["id"]: one for one in document["sandboxes"]}


def test_an_exclusive_pcpu_of_two_sandboxes_is_a_conflict() -> None:
    """Both are shown as in conflict and say with whom; a third one is not."""
    shown = _shown(
        _facts("a", world.exclusive("x", "4-5")),
        _facts("b", world.exclusive("x", "5-6")),
        _facts("c", world.exclusive("x", "7")),
    )
    assert [shown[one]["state"] for one in "abc"] == ["conflict", "conflict", "drift"]
    told = [note["text"] for note in shown["a"]["notes"] if note["code"] == "conflict-exclusive"]
    assert told == ["the exclusive pCPUs 5 are claimed by b too"]


def test_threads_of_a_released_sandbox_do_not_drift() -> None:
    """Where an operator gave the pins back, no thread is off its place."""
    shown = _shown(_facts("a", world.exclusive("x", "4"), released=True))["a"]
    assert (shown["state"], [t["state"] for t in shown["threads"]]) == ("released", ["released"])
