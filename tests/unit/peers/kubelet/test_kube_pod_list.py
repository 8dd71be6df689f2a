"""The kubelet's list of pods: annotations about CPUs, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kata_pin.base.allocation import PodSpec
from kata_pin.base.errors import ParseError
from kata_pin.peers.kubelet import pods as podlist
from kata_pin.peers.kubelet.pods import Pods, about_cpus, parse_pods

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
    assert parse_pods(data).specs == {
        "u1": PodSpec({OURS: "share", CRANES: "none"}),
        "u2": PodSpec(),
    }
    assert parse_pods(_list()) == Pods({})


def test_init_containers_and_sidecars() -> None:
    """An init container that restarts always is a sidecar: it does not end before the others."""
    listed = _pod("u1")
    listed["spec"]["initContainers"] = [
        {"name": "setup"},
        {"name": "proxy", "restartPolicy": "Always"},
        {"name": "wait", "restartPolicy": None},
    ]
    assert parse_pods(_list(listed)).specs["u1"].inits == {"setup", "wait"}


@pytest.mark.parametrize(
    ("resources", "level"),
    [
        (None, False),
        ({}, False),
        ({"requests": {}, "limits": None, "claims": [{"name": "x"}]}, False),
        ({"requests": {"cpu": "2"}}, True),
        ({"limits": {"memory": "1Gi"}}, True),
    ],
)
def test_pod_level_resources(resources: object, level: bool) -> None:
    """Requests or limits of the pod itself, whatever of (resourcehelper.IsPodLevelResourcesSet)."""
    listed = _pod("u1")
    listed["spec"]["resources"] = resources
    assert parse_pods(_list(listed)).specs["u1"].pod_level is level


def test_a_pods_author_hides_no_others() -> None:
    """Any number of annotations, and commas in them, leave every pod of the list as it is."""
    many = _pod("u1", **{f"a{number}": "," for number in range(5000)}, **{OURS: "share"})
    commas = _pod("u2", other="," * (podlist.MAX_VALUES + 1))
    assert parse_pods(_list(many, commas, _pod("u3"))) == Pods(
        {"u1": PodSpec({OURS: "share"}), "u2": PodSpec(), "u3": PodSpec()}
    )


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (7, "not an object"),
        ({"metadata": {}}, "uid: missing"),
        ({"metadata": {"uid": "u"}, "spec": "x" * podlist.MAX_POD_BYTES}, "longer than"),
        ({"metadata": {"uid": "u"}, "spec": [[]] * 150_000}, "more than 200000 values"),
        ({"metadata": {"uid": "../x"}}, "not a uid"),
        ({"metadata": {"uid": "u"}, "spec": {"initContainers": [{}] * 300}}, "more than 256"),
        ({"metadata": {"uid": "u"}, "spec": {"initContainers": [{"name": 1}]}}, "not a text"),
        ({"metadata": {"uid": "u"}, "spec": {"resources": {"limits": 2}}}, "not an object"),
        ({"metadata": {"uid": "u", "annotations": {OURS: 1}}}, "not a text"),
        ({"metadata": {"uid": "u", "annotations": [1]}}, "not an object"),
    ],
)
def test_a_pod_that_cannot_be_read_is_left_out(item: object, said: str) -> None:
    """The others stay, and the problem names the place."""
    pods = parse_pods(_list(_pod("u1"), item, _pod("u2")))
    assert pods.specs == {"u1": PodSpec(), "u2": PodSpec()}
    (problem,) = pods.problems
    assert "items[1]" in str(problem)
    assert said in str(problem)


def test_a_long_value_is_cut() -> None:
    """It means nothing either way, and is not kept."""
    assert len(about_cpus({OURS: "x" * 9999})[OURS]) == podlist.MAX_VALUE


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a list of pods"),
        (b"[]", "not a list of pods: Expected `object`"),
        (b"Unauthorized", "not a list of pods: JSON is malformed"),
        (b'{"items": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"kind": "PodList", "items": [' + b"{}," * 600_000 + b"{}]}", "500000 values"),
        (b" " * (podlist.MAX_BYTES + 1), "longer than"),
        (_list(kind="Status"), "not a PodList"),
        (_list(*[_pod(f"u{n}") for n in range(podlist.MAX_PODS + 1)]), "more than 4096"),
    ],
)
def test_what_is_no_such_list(data: bytes, said: str) -> None:
    """Anything else is refused as a whole."""
    with pytest.raises(ParseError, match=said):
        parse_pods(data)
