"""What an API server answers to the reporter: the double's answers are those of a real one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kata_pin.options.cluster import values
from kata_pin.options.cluster.api import APPLY, JSON_PATCH, MERGE, STRATEGIC, ApiRefused, ApiServer
from kata_pin.options.cluster.decide import NOTHING_KNOWN
from kata_pin.options.cluster.values import PodEvent, Zone
from kata_pin.peers.http import HttpAnswer, HttpClient
from tests.support import apidouble
from tests.support.apidouble import CONFLICT, CREATED, MISSING, OK, Answer, api_double
from tests.support.controlplane import NEEDS_CLUSTER, control_plane
from tests.support.definitions import definition

DEFINITION = Path(__file__).resolve().parents[2] / "hooks/charts/kata-pin/files/nodeplacements.yaml"
TAINT = "kata-pin.io/starting"
WHEN = "2026-11-23T04:00:00.000000Z"
DAEMONSETS = "/apis/apps/v1/namespaces/default/daemonsets"

pytestmark = pytest.mark.timeout(600)

T = TypeVar("T")
Object = dict[str, Any]


@dataclass
class Client(HttpClient):
    """A client that notes the status of each answer."""

    statuses: list[int] = field(default_factory=list)

    async def ask(
        self,
        method: str,
        path: str,
        use: Callable[[HttpAnswer], T],
        *,
        body: bytes | None = None,
        kind: str = "",
    ) -> T:
        def noted(answer: HttpAnswer) -> T:
            self.statuses.append(answer.status)
            return use(answer)

        return await super().ask(method, path, noted, body=body, kind=kind)


@dataclass(frozen=True)
class Server:
    """A server: the double gives the answers that it `plays`, the real one has what it `has`.

    `strangers` are clients that it knows as nobody, and as nobody who may do anything.
    """

    client: Client
    strangers: tuple[Client, Client]
    plays: Callable[..., None]
    has: Callable[[Object, str], None]

    @property
    def api(self) -> ApiServer:
        """Return what the reporter asks it with."""
        return ApiServer(self.client)

    async def statuses(self, request: Awaitable[object]) -> list[int]:
        """Return the status of each answer to a request, the last one also if it refuses."""
        self.client.statuses.clear()
        with contextlib.suppress(ApiRefused):
            await request
        return self.client.statuses


def double() -> Iterator[Server]:
    """Yield the double."""
    with api_double() as api:

        def plays(*answers: Answer) -> None:
            api.answers += answers

        clients = [Client(api.url) for _ in range(3)]
        yield Server(clients[0], (clients[1], clients[2]), plays, lambda *_: None)


def real(folder: Path) -> Iterator[Server]:
    """Yield a real one, with a client that may do everything."""
    with control_plane(folder) as cluster:
        for file in (str(DEFINITION), str(definition("noderesourcetopologies"))):
            cluster.kubectl("apply", "--server-side", "-f", file)
            cluster.kubectl("wait", "--for=condition=Established", "-f", file)
        for name in ("reporter", "nobody"):
            cluster.kubectl("create", "serviceaccount", name)
            (folder / name).write_text(cluster.kubectl("create", "token", name).strip())
        (folder / "unknown").write_text("a.b.c")
        cluster.kubectl(
            *("create", "clusterrolebinding", "reporter", "--clusterrole=cluster-admin"),
            "--serviceaccount=default:reporter",
        )
        ours, unknown, nobody = (
            Client(cluster.url, token=str(folder / name), ca=str(cluster.ca), deadline_s=60)
            for name in ("reporter", "unknown", "nobody")
        )

        def has(made: Object, manager: str) -> None:
            command = ("apply", "--server-side", f"--field-manager={manager}", "-f", "-")
            cluster.kubectl(*command, given=json.dumps(made))

        yield Server(ours, (unknown, nobody), lambda *_: None, has)


@pytest.fixture(
    scope="module",
    params=[
        "double",
        pytest.param("real", marks=[pytest.mark.peer, pytest.mark.root, NEEDS_CLUSTER]),
    ],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    yield from double() if request.param == "double" else real(tmp_path_factory.mktemp("api"))


async def test_an_object_that_is_missing(server: Server) -> None:
    """Its status cannot be applied; the object can, and then its status."""
    server.plays(MISSING, CREATED, OK, OK)
    applied = server.api.apply("n1", "u1", NOTHING_KNOWN)
    assert await server.statuses(applied) == [404, 201, 200]
    assert await server.statuses(server.api.apply("n1", "u1", NOTHING_KNOWN)) == [200]


async def test_who_may_not(server: Server) -> None:
    """A token that is not accepted, and one without a right, are told apart by the status."""
    answers = (apidouble.UNAUTHORIZED, apidouble.FORBIDDEN)
    for answer, client in zip(answers, server.strangers, strict=True):
        server.plays(answer)
        with pytest.raises(ApiRefused) as caught:
            await ApiServer(client).apply("n1", "u1", NOTHING_KNOWN)
        assert caught.value.status == answer[0]
        assert ("forbidden" in caught.value.message) is (answer is apidouble.FORBIDDEN)


async def test_a_field_that_the_definition_lacks(server: Server) -> None:
    """The words of the refusal tell it from other failures."""
    server.plays(apidouble.UNDECLARED)
    kind = {"apiVersion": values.GROUP, "kind": values.KIND}
    server.has({**kind, "metadata": {"name": "n2"}}, "kubectl")  # n1 has an owner that is no Node
    whole = {**kind, "status": {"nope": 1}}
    path = "/apis/kata-pin.io/v1alpha1/nodeplacements/n2/status?fieldManager=kata-pin"
    with pytest.raises(ApiRefused) as caught:
        await server.api._write("PATCH", path, json.dumps(whole).encode(), APPLY)
    assert caught.value.status == 500
    assert "CustomResourceDefinition is of another version" in caught.value.hint


async def test_a_taint(server: Server) -> None:
    """An empty patch returns the Node; a patch that fits no more is refused by 422."""
    taints = [{"key": key, "effect": "NoSchedule"} for key in ("other", TAINT)]
    made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
    server.has({**made, "spec": {"taints": taints}}, "kubectl")
    server.plays(apidouble.node(*taints), OK, apidouble.node(taints[0]))
    assert await server.api.remove_taint("n1", TAINT)
    assert not await server.api.remove_taint("n1", TAINT)
    stale = values.encode_taint_removal(apidouble.node(*taints)[1], TAINT)
    server.plays(apidouble.CHANGED)
    patched = server.api._write("PATCH", "/api/v1/nodes/n1", stale, JSON_PATCH)
    assert await server.statuses(patched) == [422]


async def test_zones(server: Server) -> None:
    """Nobody's are written; another manager's have its name, and are a conflict."""
    zones = [Zone(0, 4, 4, 2)]
    server.plays(MISSING, CREATED, apidouble.written_by("kata-pin"))
    assert await server.api.topology_writer("n1") == ""
    assert await server.statuses(server.api.apply_topology("n1", "", zones)) == [201]
    assert await server.api.topology_writer("n1") == ""
    theirs = {
        "apiVersion": values.TOPOLOGY_GROUP, "kind": "NodeResourceTopology",
        "metadata": {"name": "n2"}, "zones": [{"name": "theirs", "type": "Node"}],
    }  # fmt: skip
    server.has(theirs, "nfd")
    server.plays(apidouble.written_by("nfd"), CONFLICT)
    assert await server.api.topology_writer("n2") == "nfd"
    zones_of_theirs = {**theirs, "zones": [{"name": "theirs", "type": "Other"}]}
    path = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/n2?fieldManager=kata-pin"
    applied = server.api._write("PATCH", path, json.dumps(zones_of_theirs).encode(), APPLY)
    assert await server.statuses(applied) == [409]


async def test_an_event(server: Server) -> None:
    """It exists once, and an empty patch returns how often it was counted."""
    reported = PodEvent("ExclusiveCPUConflict", "s1", "default/web", "u1", "note", "PlacingThreads")
    once = {"name": "web.1", "node": "n1", "when": WHEN}
    server.plays(CREATED, CONFLICT, OK, OK, apidouble.event(2), OK, apidouble.event(3))
    assert await server.statuses(server.api.report(reported, **once)) == [201]
    assert await server.statuses(server.api.report(reported, **once)) == [409]
    for _ in range(2):
        repeated = server.api.repeat(reported, name="web.1", when=WHEN)
        assert await server.statuses(repeated) == [200, 200]
    path = "/apis/events.k8s.io/v1/namespaces/default/events/web.1"
    found = await server.api._write("PATCH", path, b"{}", MERGE)
    assert values.parse_series(bytes(found.body)) == 3


async def test_a_rollout_that_nobody_has_seen(server: Server) -> None:
    """The patch returns the DaemonSet, of which nothing is updated yet."""
    server.plays(MISSING)
    patch = values.encode_release()
    missing = server.api._write("PATCH", f"{DAEMONSETS}/none", patch, STRATEGIC)
    assert await server.statuses(missing) == [404]
    labels = {"app": "kata-pin"}
    container = {"name": "daemon", "image": "none"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    metadata = {"name": "kata-pin", "namespace": "default"}
    made = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata}
    server.has({**made, "spec": {"selector": {"matchLabels": labels}, "template": template}}, "x")
    server.plays(apidouble.daemonset(0, 0, 0, seen=0))
    found = await server.api._write("PATCH", f"{DAEMONSETS}/kata-pin", patch, STRATEGIC)
    assert values.parse_rollout(bytes(found.body)) == (1, 0, 0)
