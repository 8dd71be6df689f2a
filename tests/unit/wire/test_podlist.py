"""The kubelet's list of pods: annotations about CPUs, and nothing else."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kata_pin.errors import ParseError
from kata_pin.wire import podlist
from kata_pin.wire.podlist import about_cpus, parse_pods

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
    assert parse_pods(data) == {"u1": {OURS: "share", CRANES: "none"}, "u2": {}}
    assert parse_pods(_list()) == {}


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
        (_list({"metadata": {}}), "uid: missing"),
        (_list({"metadata": {"uid": "../x"}}), "not a uid"),
        (_list({"metadata": {"uid": "u", "annotations": {OURS: 1}}}), "not a text"),
        (_list(*[_pod(f"u{n}") for n in range(podlist.MAX_PODS + 1)]), "more than 4096"),
    ],
)
def test_what_is_no_such_list(data: bytes, said: str) -> None:
    """Anything else is refused as a whole."""
    with pytest.raises(ParseError, match=said):
        parse_pods(data)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    """Any bytes are a list or a ParseError."""
    with suppress(ParseError):
        parse_pods(data)
