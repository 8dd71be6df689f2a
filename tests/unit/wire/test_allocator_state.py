"""The allocator's state as a document."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kata_pin.errors import ParseError
from kata_pin.model.alloc import (
    AllocState,
    ContainerRequest,
    CpuClass,
    Grant,
    GrantKind,
    PodRequest,
    Qos,
)
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.wire.allocator_state import dump_state, parse_state

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


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda d: d.update(version=2), "version"),
        (lambda d: d.pop("version"), "version"),
        (lambda d: d.update(cpus="0-x"), "cpus"),
        (lambda d: d["grants"].append(d["grants"][0]), "container_id"),
        (change_grant("exclusive", "7-9"), "exclusive"),
        (change_grant("class", "shared"), "class"),
        (change_grant("kind", "pod"), "kind"),
        (change_grant("pod", 7), "pod"),
        (change_grant("pod", -1), "pod"),
        (change_grant("pod", None), "pod"),
        (change_grant("cpu_millis", -1), "cpu_millis"),
        (change_grant("container_id", None), "container_id"),
        (change_grant("shared", 5), "shared"),
        (lambda d: d["grants"][2].update(exclusive="2"), "exclusive"),
        (lambda d: d["pods"][0].update(qos="gold"), "qos"),
        (lambda d: d["pods"][0].update(ordered="maybe"), "ordered"),
        (lambda d: d.update(pods=[]), "pod"),
    ],
)
def test_damage_is_an_error_that_names_the_place(damage: Callable[[Any], None], named: str) -> None:
    """A document that can not be ours is refused: a CPU exclusive twice, an unknown word."""
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
