"""The kubelet's list of pods: annotations about CPUs, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kata_pin.errors import ParseError
from kata_pin.wire.kube import pod_list as podlist
from kata_pin.wire.kube.pod_list import Pods, about_cpus, parse_pods

OURS, CRANES = "cpu-policy.kata-pin.io", "qos.gocrane.io/cpu-manager"


def _list(*pods: Any, **fields: Any) -> bytes:
    return json.dumps({"kind": "PodList", "apiVersion": "v1", "items": pods} | fields).encode()


def _pod(uid: str, **annotations: str) -> dict[str, Any]:
    return {
        "metadata": {"uid": uid, "name": "web", "annotations": annotations or None},
        "spec": {"containers": [{"name": "app", "image": "x"}]},
    }


def test_annotations_by_uid() -> None:
    """Keys that policies read, of each pod; a pod without any is named too."""
    data = _list(_pod("u1", **{OURS: "share", CRANES: "none", "other": "x"}), _pod("u2"))
    assert parse_pods(data).annotations == {"u1": {OURS: "share", CRANES: "none"}, "u2": {}}
    assert parse_pods(_list()) == Pods({})


def test_a_pods_author_hides_no_others() -> None:
    """Any number of annotations, and commas in them, leave every pod of the list as it is."""
    many = _pod("u1", **{f"a{number}": "," for number in range(5000)}, **{OURS: "share"})
    commas = _pod("u2", other="," * (podlist.MAX_VALUES + 1))
    assert parse_pods(_list(many, commas, _pod("u3"))) == Pods(
        {"u1": {OURS: "share"}, "u2": {}, "u3": {}}
    )


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (7, "not an object"),
        ({"metadata": {}}, "uid: missing"),
        ({"metadata": {"uid": "../x"}}, "not a uid"),
        ({"metadata": {"uid": "u", "annotations": {OURS: 1}}}, "not a text"),
        ({"metadata": {"uid": "u", "annotations": [1]}}, "not an object"),
    ],
)
def test_a_pod_that_cannot_be_read_is_left_out(item: object, said: str) -> None:
    """The others stay, and the problem names the place."""
    pods = parse_pods(_list(_pod("u1"), item, _pod("u2")))
    assert pods.annotations == {"u1": {}, "u2": {}}
    (problem,) = pods.problems
    assert "items[1]" in str(problem)
    assert said in str(problem)


def test_a_long_value_is_cut() -> None:
    """It means nothing either way, and is not kept."""
    assert len(about_cpus({OURS: "x" * 9999})[OURS]) == podlist.MAX_VALUE


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (b"[]", "not an object"),
        (b"Unauthorized", "not JSON"),
        (_list(kind="Status"), "not a PodList"),
        (_list(*[_pod(f"u{n}") for n in range(podlist.MAX_PODS + 1)]), "more than 4096"),
    ],
)
def test_what_is_no_such_list(data: bytes, said: str) -> None:
    """Anything else is refused as a whole."""
    with pytest.raises(ParseError, match=said):
        parse_pods(data)
