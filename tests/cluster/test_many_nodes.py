"""Many nodes' objects, in a cluster that has the load of so many nodes: kwok plays kubelets.

DaemonSet, scheduler and garbage collector are Kubernetes' own; each node's reporter is ours, with
the token of its own pod, and only the daemon's documents are made up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.state import State
from kata_pin.options.cluster.api import ApiServer
from kata_pin.options.cluster.publisher import PERIOD_S, NodeDaemon, Publisher, Topology
from kata_pin.peers.http import HttpClient
from tests.support.apiload import Load
from tests.support.controlplane import NEEDS_CLUSTER, ControlPlane, control_plane, controllers
from tests.support.definitions import definition
from tests.support.fakenodes import NEEDS_KWOK, Administrator, fake_nodes, kwok, together
from tests.support.waiting import SCALE
from tests.unit.cli import documents

CHART = Path(__file__).resolve().parents[2] / "hooks" / "charts" / "kata-pin"
SPACE = "kata-pin"
NODES = int(os.environ.get("KATA_PIN_CLUSTER_NODES", "20"))
"""docs/verification.md has the figures of 50 and 500, which are measured for longer too."""
LOOK_S, WINDOW_S = (PERIOD_S, 60.0) if NODES >= 50 else (2.0, 5.0)
OBJECTS = "/apis/kata-pin.io/v1alpha1/nodeplacements"
OURS = ("nodeplacements", "events", "noderesourcetopologies")

pytestmark = [NEEDS_CLUSTER, NEEDS_KWOK, pytest.mark.root, pytest.mark.timeout(600 + 6 * NODES)]


class Played(NodeDaemon):
    """A daemon with 20 sandboxes; each `turn` changes one of them, and the free pCPUs."""

    def __init__(self, node: str) -> None:
        super().__init__("/nowhere")
        pods = [f"shop/{node}-{number}" for number in range(20)]
        self.__dict__["pods"] = [documents.sandbox(one, "4-7", pod_uid="u") for one in pods]
        self.__dict__["turn"] = 0

    async def state(self) -> State:
        """Return the document; from turn 1 on the first pod's exclusive pCPU is another's too."""
        turn, (first, *others) = self.__dict__["turn"], self.__dict__["pods"]
        if turn:
            first = replace(first, state="conflict", exclusive=str(turn))
        state = documents.allotted()
        assert state.allocation is not None
        pools = replace(state.allocation.pools, shared=f"{turn},8-9")
        allocation = replace(state.allocation, pools=pools)
        return replace(state, sandboxes=(first, *others), allocation=allocation)

    async def watch(self) -> None:
        """Nothing was seen of exclusive pCPUs."""


@dataclass
class Fleet:
    """The nodes' reporters, which run as on their nodes."""

    cluster: ControlPlane
    admin: Administrator
    reporters: list[Publisher] = field(default_factory=list)

    async def join(self, node: str, pod: str) -> None:
        """Make a node's reporter, with the token of the DaemonSet's pod on it."""
        bound = {"boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": pod}}
        wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": bound}
        path = f"/api/v1/namespaces/{SPACE}/serviceaccounts/{SPACE}/token"
        token = self.cluster.folder / f"{node}.token"
        token.write_text(json.loads(await self.admin.ask("POST", path, wanted))["status"]["token"])
        # one process and two CPUs for all of them: more patience than a reporter has
        client = HttpClient(
            self.cluster.url, token=str(token), ca=str(self.cluster.ca), deadline_s=60.0
        )
        api = ApiServer(client)
        claims = api.claims()
        assert claims.node == node
        topology = Topology(api, node, claims.node_uid)
        self.reporters.append(
            Publisher(Played(node), api, node, claims.node_uid, period_s=LOOK_S, topology=topology)
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all of them for the block."""
        tasks = [asyncio.create_task(one.run()) for one in self.reporters]
        try:
            yield
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def turn(self, number: int) -> None:
        """Change something on every node at once."""
        for one in self.reporters:
            one.daemon.__dict__["turn"] = number

    def shows(self, turn: int) -> bool:
        """Whether every reporter has written everything of a turn, without a problem left."""
        return all(
            one._written is not None
            and any(pod.exclusive == str(turn) for pod in one._written.pods) is bool(turn)
            and one.topology is not None
            and one.topology._written == one.topology._zones
            and one.topology._written[0].available == _free(turn)
            and not one.api_problem
            for one in self.reporters
        )

    def refusals(self) -> list[int]:
        """Return how many rounds of each reporter were refused with 429."""
        return [one.requests["429"] for one in self.reporters]

    async def load(self) -> Load:
        """Return what the API server says of its load now."""
        text = (await self.admin.ask("GET", "/metrics")).decode()
        return await asyncio.to_thread(Load.of, text)


def _free(turn: int) -> int:
    """Return how many pCPUs of NUMA node 0 are free in a turn: shared and not reserved."""
    return sum(cpu in {turn, 8, 9} and cpu != 0 for cpu in NODE_0)


NODE_0 = frozenset(place.cpu for place in documents.allotted().node.cpus if place.node == 0)


async def until(what: str, holds: Callable[[], Any], timeout_s: float) -> float:
    """Wait; return how long it took, in seconds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < timeout_s * SCALE, f"{what}: not in {timeout_s:g} s"
        await asyncio.sleep(0.2)
    return time.monotonic() - began


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ControlPlane]:
    """Nodes that kwok plays, controllers, and the chart; no pod has run yet."""
    with control_plane(tmp_path) as one, controllers(one), kwok(one):
        file = str(definition("noderesourcetopologies"))
        one.kubectl("create", "namespace", "shop")
        one.kubectl("apply", "--server-side", "-f", file)
        one.kubectl("wait", "--for=condition=Established", "-f", file)
        value = "reporter.nodeResourceTopology=true"
        one.run(
            "helm", "install", SPACE, str(CHART), "-n", SPACE, "--create-namespace", "--set", value
        )
        yield one


async def settled(cluster: ControlPlane, admin: Administrator) -> Fleet:
    """Return the reporters, once the pods of the DaemonSet and the nodes' own are ready."""
    names = await fake_nodes(admin, NODES, pods=5)
    path = f"/apis/apps/v1/namespaces/{SPACE}/daemonsets/{SPACE}"
    for _ in range(300 + NODES):
        if json.loads(await admin.ask("GET", path))["status"].get("numberReady") == NODES:
            break
        await asyncio.sleep(1)
    pods = json.loads(await admin.ask("GET", f"/api/v1/namespaces/{SPACE}/pods"))["items"]
    by_node = {one["spec"]["nodeName"]: one["metadata"]["name"] for one in pods}
    fleet = Fleet(cluster, admin)
    await together(fleet.join, ((name, by_node[name]) for name in names))
    return fleet


async def test_many_nodes(cluster: ControlPlane, capsys: pytest.CaptureFixture[str]) -> None:
    """All start, nothing changes, all change, most are refused, and one is deleted."""

    def tell(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", end="", flush=True)

    admin = Administrator(cluster)
    fleet = await settled(cluster, admin)
    tell(f"{NODES} nodes with {NODES * 6} pods")
    before = await fleet.load()

    async def phase(what: str) -> Load:
        nonlocal before
        now = await fleet.load()
        load, before = now.since(before), now
        sent = sum(load.sent[one] for one in OURS) / NODES
        tell(f"{what}: {load.said(*OURS, 'leases')}; {sent:.0f} bytes of ours per node")
        return load

    if NODES >= 50:  # the load without us is a figure, not a condition
        await asyncio.sleep(WINDOW_S)
        await phase("without us")
    async with fleet.running():
        took = await until("all objects", lambda: fleet.shows(0), 100 + NODES)
        load = await phase(f"created in {took:.1f} s")
        assert load.count("nodeplacements") == 3 * NODES  # the first says that there is none yet
        assert load.count("noderesourcetopologies") == 2 * NODES

        await asyncio.sleep(WINDOW_S)
        load = await phase("nothing changes")
        assert load.count("nodeplacements", "noderesourcetopologies") == 0

        fleet.turn(1)
        took = await until("all changes", lambda: fleet.shows(1), 100 + NODES)
        load = await phase(f"all changed in {took:.1f} s")
        assert load.count("nodeplacements") == load.count("noderesourcetopologies") == NODES
        assert load.count("events", status="201") >= NODES

        tell(await refused(fleet))
        began = time.monotonic()
        listed = await admin.ask("GET", OBJECTS)
        size = len(listed) / NODES
        tell(f"listed in {time.monotonic() - began:.2f} s, {size:.0f} bytes each")
        objects = json.loads(listed)["items"]
        assert len(objects) == NODES
        assert {one["metadata"]["ownerReferences"][0]["kind"] for one in objects} == {"Node"}
    tell(await deleted(fleet))


async def refused(fleet: Fleet) -> str:
    """Let the API server serve one of our requests at a time while all nodes change."""
    path = "/apis/flowcontrol.apiserver.k8s.io/v1"
    kind = {"apiVersion": "flowcontrol.apiserver.k8s.io/v1", "metadata": {"name": "one-reporter"}}
    none = {"nominalConcurrencyShares": 0, "lendablePercent": 0, "borrowingLimitPercent": 0}
    limited = {"type": "Limited", "limited": none | {"limitResponse": {"type": "Reject"}}}
    level = kind | {"kind": "PriorityLevelConfiguration", "spec": limited}
    who = {"kind": "ServiceAccount", "serviceAccount": {"name": SPACE, "namespace": SPACE}}
    what = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": True,
            "namespaces": ["*"]}  # fmt: skip
    rules = [{"subjects": [who], "resourceRules": [what]}]
    spec = {"priorityLevelConfiguration": {"name": "one-reporter"}, "matchingPrecedence": 2}
    schema = kind | {"kind": "FlowSchema", "spec": spec | {"rules": rules}}
    await fleet.admin.ask("POST", f"{path}/prioritylevelconfigurations", level)
    await fleet.admin.ask("POST", f"{path}/flowschemas", schema)
    await asyncio.sleep(2)  # the API server takes it in
    before, refused_before = await fleet.load(), fleet.refusals()
    fleet.turn(2)
    took = await until("all changes, refused at first", lambda: fleet.shows(2), 200 + NODES)
    load = (await fleet.load()).since(before)
    rounds = [now - then for now, then in zip(fleet.refusals(), refused_before, strict=True)]
    assert load.count("nodeplacements", status="429") > 0
    assert load.count("nodeplacements", status="200") == NODES
    await fleet.admin.ask("DELETE", f"{path}/flowschemas/one-reporter")
    return (
        f"one request of ours at a time, others 429: all changed in {took:.1f} s; "
        f"{load.count(status='429')} answers of 429 to {sum(map(bool, rounds))} nodes, "
        f"at most {max(rounds)} rounds of one; CPU {load.cpu_s:.1f} s"
    )


async def deleted(fleet: Fleet) -> str:
    """Delete a Node: Kubernetes' garbage collector deletes what belongs to it."""
    name, admin = fleet.reporters[0].node, fleet.admin
    listed = (OBJECTS, "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies")

    async def names() -> set[str]:
        found = [json.loads(await admin.ask("GET", path))["items"] for path in listed]
        return {one["metadata"]["name"] for items in found for one in items}

    assert name in await names()
    began = time.monotonic()
    await admin.ask("DELETE", f"/api/v1/nodes/{name}")
    while name in (left := await names()):
        assert time.monotonic() - began < 120 * SCALE
        await asyncio.sleep(0.5)
    assert len(left) == NODES - 1
    return f"objects of a deleted Node gone in {time.monotonic() - began:.1f} s"
