"""The allocator's state as a document."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kata_pin.base.allocation import (
    AllocState,
    AtCreation,
    ContainerRequest,
    Grant,
    Limits,
    Mount,
    PodRequest,
    Qos,
)
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.base.values import CpuClass, GrantKind
from kata_pin.options.allocation.requests import dump_state, parse_state

POD = PodRequest(
    "uid",
    "shop",
    "wéb",
    "kata",
    {"cpu-policy.kata-pin.io": "share"},
    Qos.GUARANTEED,
    kata=True,
    sandbox_id="vm",
    overhead_millis=250,
    ordered=CpuClass.EXCLUSIVE,
)
FULL = AllocState(
    CpuSet(range(8)),
    CpuSet([0]),
    CpuSet([9]),
    {
        "one": Grant(
            ContainerRequest("one", POD, "app", 2500, 250_000, 100_000),
            "topology",
            CpuClass.EXCLUSIVE,
            exclusive=CpuSet([1, 2]),
            shared=CpuSet([3, 4]),
            zone=CpuSet(range(5)),
            mems=CpuSet([0]),
            reasons=("because", "of this"),
            limits=Limits(shares=512, quota_us=-1, memory=1 << 30),
            creation=AtCreation(
                (("2MB", 1 << 21),), "gold", "fast", (("A", "b"),), (Mount("/a", "/b"),)
            ),
        ),
        "vm": Grant(
            ContainerRequest("vm", POD), "topology", shared=CpuSet([9]), kind=GrantKind.SANDBOX
        ),
        "two": Grant(
            ContainerRequest("two", PodRequest("other"), init=True, quota_us=-1),
            "static",
            CpuClass.SHARE,
            shared=EMPTY,
        ),
    },
)


@pytest.mark.parametrize("state", [FULL, AllocState()], ids=["full", "empty"])
def test_round_trip(state: AllocState) -> None:
    """A state comes back as it was, in its order, and equal states give equal bytes."""
    again = parse_state(dump_state(state))
    assert again == state
    assert list(again.grants) == list(state.grants)
    assert dump_state(again) == dump_state(state)


def test_a_state_of_an_earlier_version_is_read() -> None:
    """Grants that carry nothing beside CPUs were written without the members for it."""
    document = json.loads(dump_state(FULL))
    for grant in document["grants"]:
        del grant["limits"], grant["creation"]
    (one, *_) = parse_state(json.dumps(document).encode()).grants.values()
    assert (one.limits, one.creation) == (Limits(), AtCreation())


def test_pods_are_told_apart_by_annotations() -> None:
    """Containers that know different annotations of one pod keep them."""
    changed = PodRequest("uid", annotations={"a": "b"})
    plain = PodRequest("uid")
    grants = {
        name: Grant(ContainerRequest(name, owner), "static")
        for name, owner in (("one", changed), ("two", plain))
    }
    again = parse_state(dump_state(AllocState(grants=grants)))
    assert again.grants["one"].request.pod.annotations == {"a": "b"}
    assert again.grants["two"].request.pod.annotations == {}


def change_grant(key: str, value: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        document["grants"][0][key] = value

    return change


def change_request(key: str, value: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        document["grants"][0]["request"][key] = value

    return change


def change_pod(key: str, value: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        document["grants"][0]["request"]["pod"][key] = value

    return change


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda d: d.update(version=1), "version: not 2"),
        (lambda d: d.update(version=True), "version: not an integer"),
        (lambda d: d.pop("version"), "version: missing"),
        (lambda d: d.update(cpus="0-x"), "cpus: .*not a CPU number"),
        (lambda d: d.update(cpus=[0, 1]), "cpus: not a CPU list"),
        (lambda d: d.pop("reserved"), "reserved"),
        (lambda d: d.update(grants={}), "grants: "),
        (lambda d: d["grants"].append(d["grants"][0]), r"grants\[3\]: .*container_id"),
        (change_grant("exclusive", "7-9"), r"grants\[0\]: exclusive CPUs 7-9"),
        (lambda d: d["grants"][2].update(exclusive="2"), r"grants\[2\]: exclusive"),
        (change_grant("exclusive", "0-99999999999"), r"grants\[0\].exclusive: "),
        (change_grant("cpu_class", "shared"), r"grants\[0\].cpu_class: .*'shared'"),
        (change_grant("kind", "pod"), r"grants\[0\].kind: "),
        (change_grant("shared", 5), r"grants\[0\].shared: "),
        (change_grant("reasons", "x"), r"grants\[0\].reasons: "),
        (change_request("pod", 7), r"grants\[0\].request.pod: "),
        (change_request("pod", None), r"grants\[0\].request.pod: "),
        (change_request("cpu_millis", -1), r"grants\[0\]: cpu_millis"),
        (change_request("cpu_millis", 1 << 70), r"grants\[0\]: cpu_millis"),
        (change_request("cpu_millis", True), r"grants\[0\].request.cpu_millis: "),
        (change_request("quota_us", -(1 << 63)), r"grants\[0\]: quota_us"),
        (change_request("period_us", -1), r"grants\[0\]: period_us"),
        (change_request("container_id", None), r"grants\[0\].request.container_id: "),
        (change_request("container_id", ""), r"grants\[0\]: container_id is empty"),
        (change_request("name", "\ud800"), "surrogate"),
        (change_pod("qos", "gold"), r"grants\[0\].request.pod.qos: "),
        (change_pod("ordered", "maybe"), r"grants\[0\].request.pod.ordered: "),
        (change_pod("overhead_millis", 1 << 40), r"grants\[0\]: overhead_millis"),
        (change_pod("annotations", {"a": 1}), r"grants\[0\].request.pod.annotations"),
    ],
)
def test_damage_is_an_error_that_names_the_place(damage: Callable[[Any], None], named: str) -> None:
    """A document that cannot be ours is refused: a CPU exclusive twice, an unknown word."""
    document = json.loads(dump_state(FULL))
    damage(document)
    with pytest.raises(ParseError, match=named):
        parse_state(json.dumps(document).encode())


def test_any_cut_is_an_error() -> None:
    """A file that ends too early is never half a state."""
    data = dump_state(FULL)
    for end in range(0, len(data), 7):
        with pytest.raises(ParseError):
            parse_state(data[:end])


def test_a_repeated_key_is_an_error() -> None:
    """Readers disagree which of two equal keys counts."""
    data = dump_state(FULL).replace(b'"policy":"static"', b'"policy":"static","policy":"none"')
    with pytest.raises(ParseError, match="twice"):
        parse_state(data)


def test_members_are_those_of_this_version() -> None:
    """A renamed field of base/allocation.py changes the format: raise VERSION with it."""
    document = json.loads(dump_state(FULL))
    grant = document["grants"][0]
    assert list(document) == ["version", "cpus", "reserved", "housekeeping", "grants"]
    assert document["version"] == 2
    assert " ".join(grant) == (
        "request policy cpu_class exclusive shared zone mems kind reasons limits creation"
    )
    assert " ".join(grant["request"]) == (
        "container_id pod name cpu_millis quota_us period_us init ended_in limits devices"
    )
    assert " ".join(grant["request"]["pod"]) == (
        "pod_uid namespace name handler annotations qos kata sandbox_id overhead_millis ordered"
        " pod_level"
    )
