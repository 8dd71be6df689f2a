"""The startup taint and the NodeResourceTopology: when they are written, and when not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kata_pin.options.cluster.api import ApiRefused, ApiServer
from kata_pin.options.cluster.publisher import StartupTaint, Topology
from kata_pin.options.cluster.values import Zone
from kata_pin.peers.http import HttpClient
from tests.support.apidouble import (
    CHANGED,
    CONFLICT,
    MISSING,
    Answer,
    ApiDouble,
    api_double,
    node,
    written_by,
)
from tests.unit.cli import documents

KEY = "kata-pin.io/starting"
NODE = "/api/v1/nodes/n1"
OBJECT = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/n1?fieldManager=kata-pin"


@pytest.fixture
def double() -> Iterator[ApiDouble]:
    with api_double() as one:
        yield one


def server(double: ApiDouble) -> ApiServer:
    """Return a client of it."""
    return ApiServer(HttpClient(double.url))


async def test_a_taint_is_removed_once_the_node_is_ready(double: ApiDouble) -> None:
    """By position, with a test that nobody moved it; others stay; nothing is asked afterwards."""
    ours = [{"key": KEY, "effect": "NoSchedule"}, {"key": KEY, "effect": "NoExecute"}]
    taint = StartupTaint(server(double), "n1", KEY)
    await taint.run(ready=False)
    assert double.requests == []
    double.answers = [node(ours[0], {"key": "other", "effect": "NoSchedule"}, ours[1])]
    await taint.run(ready=True)
    (_, path, nothing), (method, _, patch) = double.requests
    assert (path, nothing, method) == (NODE, {}, "PATCH")
    assert double.types == ["application/merge-patch+json", "application/json-patch+json"]
    steps: Any = patch
    assert steps == [
        {"op": "test", "path": "/spec/taints/2", "value": ours[1]},
        {"op": "remove", "path": "/spec/taints/2"},
        {"op": "test", "path": "/spec/taints/0", "value": ours[0]},
        {"op": "remove", "path": "/spec/taints/0"},
    ]
    await taint.run(ready=True)
    assert len(double.requests) == 2


async def test_a_node_without_the_taint(double: ApiDouble) -> None:
    """Nothing is written; taints that changed meanwhile are tried again."""
    double.answers = [node()]
    await StartupTaint(server(double), "n1", KEY).run(ready=True)
    assert len(double.requests) == 1
    taint = StartupTaint(server(double), "n1", KEY)
    double.answers = [node({"key": KEY}), CHANGED, node({"key": KEY})]
    with pytest.raises(ApiRefused):
        await taint.run(ready=True)
    await taint.run(ready=True)
    assert len(double.requests) == 5


@pytest.mark.parametrize("body", [b"[]", b'{"spec": {"taints": [3]}}', b'{"spec": {"taints": 3}}'])
async def test_an_answer_that_is_no_node(double: ApiDouble, body: bytes) -> None:
    """It is an error that the loop waits out."""
    double.answers = [(200, body, {})]
    with pytest.raises(ApiRefused, match="PATCH /api/v1/nodes/n1"):
        await StartupTaint(server(double), "n1", KEY).run(ready=True)


# ---- NodeResourceTopology ------------------------------------------------------------------------


def topology(double: ApiDouble, *free: int) -> Topology:
    """Return one that has seen so many free pCPUs on each NUMA node of 8."""
    return Topology(
        server(double), "n1", "u1", _zones=tuple(Zone(n, 8, 7, one) for n, one in enumerate(free))
    )


async def test_zones_are_written_on_change(double: ApiDouble) -> None:
    """Not forced, so that another writer keeps its fields."""
    double.answers = [MISSING]
    one = topology(double, 3, 5)
    await one.run()
    await one.run()
    (_, first, _), (method, path, body) = double.requests
    assert first == path == OBJECT
    assert (method, body["metadata"]["ownerReferences"][0]["uid"]) == ("PATCH", "u1")
    assert [zone["name"] for zone in body["zones"]] == ["node-0", "node-1"]
    assert body["zones"][1]["resources"] == [
        {"name": "cpu", "capacity": "8", "allocatable": "7", "available": "5"}
    ]
    one._zones = topology(double, 3, 4)._zones
    await one.run()
    assert len(double.requests) == 3


@pytest.mark.parametrize(
    ("answers", "count"),
    [([written_by("nfd")], 1), ([written_by("kata-pin"), CONFLICT], 2)],
)
async def test_another_writer(double: ApiDouble, answers: list[Answer], count: int) -> None:
    """Whoever came first, or took the fields over, is left alone."""
    double.answers = list(answers)
    one = topology(double, 3)
    await one.run()
    assert one.other_writer
    one._zones = topology(double, 2)._zones
    await one.run()
    assert len(double.requests) == count


async def test_no_allocator_no_object(double: ApiDouble) -> None:
    """Where the kubelet allocates, its own exporters know better."""
    await topology(double).run()
    assert double.requests == []


async def test_an_allocator_that_is_switched_off(double: ApiDouble) -> None:
    """What was free by it is free no more: a scheduler would go on counting on it."""
    double.answers = [MISSING]
    one = topology(double, 3)
    await one.run()
    one.look(documents.state())
    await one.run()
    (*_, (_, _, body)) = double.requests
    assert body["zones"][0]["resources"][0]["available"] == "0"


async def test_a_cluster_without_the_definition(
    double: ApiDouble, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and is no failure that delays other writes."""
    double.answers = [MISSING, MISSING]
    one = topology(double, 3)
    await one.run()
    await one.run()
    assert len(double.requests) == 2
    assert caplog.text.count("no NodeResourceTopology: its definition is missing") == 1
