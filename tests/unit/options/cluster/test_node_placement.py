"""What the node's object and the Events say, from documents made by hand."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.document import Note
from kata_pin.base.documents.measured import WatchDocument, WatchedPcpu
from kata_pin.base.documents.pools import RefusedRequest
from kata_pin.base.documents.state import Sandbox, State
from kata_pin.base.values import NoteLevel, RefusalKind
from kata_pin.options.cluster.decide import NOTE, node_status, pod_events, ready
from kata_pin.options.cluster.values import (
    MAX_ANSWER,
    MAX_CPUS,
    MAX_POD_CPUS,
    MAX_PODS,
    MAX_TEXT,
    MAX_VIOLATIONS,
    encode_placement,
)
from tests.support.crd import definition
from tests.support.json_schema import violations as schema_violations
from tests.unit.cli import documents

REFUSED = RefusedRequest(
    "2026-11-23T04:00:00Z", "c9", "shop/web main", RefusalKind.NOT_ENOUGH_CPUS, "wants 8, free 2",
    strict=True, pod="shop/web", pod_uid="u9",
)  # fmt: skip


def sandbox(number: int = 1, **changes: object) -> Sandbox:
    """Return a sandbox without a problem."""
    facts = {"id": f"s{number}", "pod_uid": f"u{number}", "checked_s": 2.0, **changes}
    pod = str(facts.pop("pod", f"shop/pod-{number}"))
    return replace(documents.sandbox(pod, "4-7"), **{"state": "ok", **facts})


def watched(cpu: int, name: str, episode_s: float | None) -> WatchedPcpu:
    """Return a pCPU of a sandbox."""
    return WatchedPcpu(cpu, name, f"shop/{name}", 1.0, 10.0, 0.0, 3.0, 5, episode_s, None, None)


def watch(*pcpus: WatchedPcpu) -> WatchDocument:
    """Return a watch document."""
    return WatchDocument(time="", max_foreign_percent=0.1, problem="", pcpus=pcpus)


def test_a_quiet_node() -> None:
    """CPUs by NUMA node, as the kubelet gave them; those that it reserves strictly are nobody's."""
    state = documents.state(sandbox(exclusive="4-5", shared="6"), cpus=16, assigned="4-5,12-13")
    found = node_status(state, None)
    assert (found.exclusive, found.exclusive_count) == ("4-5,12-13", 4)
    assert (found.free_by_node, found.free_source) == ("0:8 1:0", "kubelet")
    assert (found.sandboxes, found.sandboxes_ok, found.violations) == (1, 1, 0)
    assert found.conditions[0].status == "True"


def test_problems_come_first() -> None:
    """A conflict, drift and foreign tasks are counted, described and sorted."""
    text = "exclusive pCPU 4 is also claimed by shop/other"
    conflict = sandbox(
        2, state="conflict", notes=(Note("conflict-exclusive", text, NoteLevel.WARNING),)
    )
    state = documents.state(sandbox(1), conflict, sandbox(3, state="drift"))
    found = node_status(state, watch(watched(4, "s1", 3.0), watched(5, "s1", 3.0)))
    assert [one.kind for one in found.violation_list] == ["conflict", "drift", "foreign-tasks"]
    assert found.violation_list[2].message == "foreign tasks run on exclusive pCPUs 4-5"
    assert [one.sandbox for one in found.pods] == ["s2", "s3", "s1"]
    assert (found.violations, found.sandboxes_ok) == (3, 1)
    events = pod_events(state, watch(watched(4, "s1", 3.0)), since=0)
    assert {(one.kind, one.pod, one.pod_uid) for one in events} == {
        ("ExclusiveCPUConflict", "shop/pod-2", "u2"),
        ("CPUIsolationBroken", "shop/pod-1", "u1"),
    }


def test_an_episode_that_ended_is_none() -> None:
    """Only what holds now counts."""
    state = documents.state(sandbox(1))
    assert pod_events(state, watch(watched(4, "s1", None)), since=0) == ()


def _hostile(count: int, name: str) -> State:
    cpus = ",".join(str(cpu) for cpu in range(0, 1024, 2))
    pods = [
        replace(sandbox(number, state="drift", exclusive=cpus, shared=cpus), pod=name * 999)
        for number in range(count)
    ]
    return documents.state(*pods, cpus=16)


@pytest.mark.parametrize("name", ["n\udc80", "\0", "\U0001f600", "<"])
def test_an_object_is_bounded(name: str) -> None:
    """With 300 sandboxes, endless names and cpu lists: clipped, and still what the CRD allows."""
    found = node_status(_hostile(300, name), None)
    assert (len(found.pods), found.pods_omitted) == (MAX_PODS, 300 - MAX_PODS)
    assert (len(found.violation_list), found.violations) == (MAX_VIOLATIONS, 300)
    assert max(len(one.pod) for one in found.pods) <= MAX_TEXT
    assert len(found.exclusive) <= MAX_CPUS
    assert len(found.pods[0].exclusive) <= MAX_POD_CPUS
    assert found.pods[0].exclusive.split(",")[-1].isdigit()
    encoded = encode_placement("n1", "u1", found)
    assert len(encoded) <= 640 * 1024
    assert len(encoded) <= MAX_ANSWER // 2, "the API server answers with the object and its own"
    check(json.loads(encoded))


def check(document: dict[str, object]) -> None:
    """Assert that a document fits the CustomResourceDefinition."""
    (version,) = definition()["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    status = document["status"]
    assert isinstance(status, dict)
    dated = [one | {"lastTransitionTime": "2026-11-23T04:00:00Z"} for one in status["conditions"]]
    whole = document | {"status": status | {"conditions": dated}}
    assert [
        one for one in schema_violations(whole, schema, schema) if ".metadata." not in one
    ] == []


def test_refused_allocations() -> None:
    """Reported once, if they are new, on their pod; without a pod nothing is."""
    allocation = documents.allotted().allocation
    assert allocation is not None
    nobody = replace(REFUSED, id="c8", pod="uid-only", pod_uid="")
    state = documents.state(sandbox(1))
    state = replace(state, allocation=replace(allocation, refused=(REFUSED, nobody)))
    (event,) = pod_events(state, None, since=0)
    assert (event.kind, event.pod, event.sandbox) == ("CPUAllocationRefused", "shop/web", "c9")
    assert event.note == "shop/web main: wants 8, free 2; the container was not created"
    assert pod_events(state, None, since=2e9) == ()
    for one in ("x", "\U0001f600", "\udc80"):
        refused = replace(REFUSED, message=one * 5000)
        long = replace(state, allocation=replace(allocation, refused=(refused,)))
        note = pod_events(long, None, since=0)[0].note
        assert NOTE - 4 < len(note.encode()) <= NOTE, "the API server counts bytes"
        assert note.endswith("...; the container was not created")


@pytest.mark.parametrize(
    ("checked", "connected", "status", "reason"),
    [
        (2.0, 5.0, "True", "Serving"),
        (None, 5.0, "False", "FirstPass"),
        (2.0, None, "False", "NotConnectedToRuntime"),
    ],
)
def test_when_a_node_is_ready(
    checked: float | None, connected: float | None, status: str, reason: str
) -> None:
    """Every sandbox was checked, and the runtime is connected where NRI is used."""
    state = documents.state(sandbox(1, checked_s=checked))
    assert state.daemon.nri is not None
    nri = replace(state.daemon.nri, connected_s=connected)
    state = replace(state, daemon=replace(state.daemon, nri=nri))
    found = ready(state)
    assert (found.status, found.reason) == (status, reason)
    assert node_status(state, None).last_audit is None or checked is not None
