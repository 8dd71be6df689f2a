"""kata-pin in a real control plane: etcd, kube-apiserver, kubectl and helm on loopback.

No node runs in it: what a kubelet or a controller would do (pods, their tokens, the rollout's
status) the test does in the API.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from kata_pin.options.cluster.api import MERGE, ApiRefused, ApiServer
from kata_pin.options.cluster.decide import NOTHING_KNOWN
from kata_pin.options.cluster.publisher import StartupTaint, Topology
from kata_pin.options.cluster.values import Zone, encode_placement
from kata_pin.peers.http import HttpClient
from kata_pin.service.protocol import encode
from tests.cluster.test_chart import EVERYTHING, rendered
from tests.support.controlplane import NEEDS_CLUSTER, ControlPlane, control_plane, programs
from tests.support.daemon import PROGRAM, Node, Pod, private_node
from tests.support.definitions import DEFINITIONS, definition
from tests.support.katalike import KataSandbox
from tests.support.waiting import wait_for

PROJECT = Path(__file__).resolve().parents[2]
CHARTS = PROJECT / "hooks" / "charts"
SPACE = "kata-pin"
pytestmark = [NEEDS_CLUSTER, pytest.mark.root, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane into which the chart was installed by helm."""
    with control_plane(tmp_path_factory.mktemp("cluster")) as one:
        one.kubectl("create", "namespace", "shop")
        install(one)
        yield one


def install(cluster: ControlPlane) -> None:
    """Install the chart."""
    chart = str(CHARTS / "kata-pin")
    cluster.run("helm", "install", SPACE, chart, "-n", SPACE, "--create-namespace")
    cluster.kubectl("wait", "--for=condition=Established", "crd/nodeplacements.kata-pin.io")


def node_pod(cluster: ControlPlane, node: str, folder: Path) -> Path:
    """Make a Node with a pod of the DaemonSet; return the file of the pod's token."""
    cluster.node(node)
    daemonset = cluster.get("daemonset", SPACE, "-n", SPACE)
    template = daemonset["spec"]["template"]
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": SPACE, "controller": True}
    owner["uid"] = daemonset["metadata"]["uid"]
    metadata = {**template["metadata"], "name": f"{SPACE}-{node}", "namespace": SPACE}
    metadata["ownerReferences"] = [owner]
    spec = {**template["spec"], "nodeName": node}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    file = folder / f"{node}.token"
    file.write_text(cluster.token(SPACE, SPACE, f"{SPACE}-{node}"))
    return file


# ---- manifests -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kata-pin.yaml", "kata-pin-undo.yaml"])
def test_every_manifest_is_accepted(cluster: ControlPlane, name: str) -> None:
    """The API server's own validation: fields, the policy's expressions, Pod Security."""
    said = cluster.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict",
        "-f", str(CHARTS / name),
    )  # fmt: skip
    assert said.count("serverside-applied") == (CHARTS / name).read_text().count("\nkind: ")


def define(cluster: ControlPlane, *names: str) -> None:
    """Add others' definitions to the cluster."""
    for name in names:
        file = str(definition(name))
        cluster.kubectl("apply", "--server-side", "-f", file)
        cluster.kubectl("wait", "--for=condition=Established", "-f", file)


def test_what_values_add_is_accepted(cluster: ControlPlane) -> None:
    """By the definitions of Prometheus' operator and of OpenShift: no field is unknown or lacks."""
    define(cluster, *DEFINITIONS)
    classes = "kataClasses.enabled=true,kataClasses.nodes=true"
    objects = rendered(EVERYTHING, "reporter.nodeResourceTopology=true", classes)
    said = cluster.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict",
        "-f", "-", given=yaml.safe_dump_all(objects),
    )  # fmt: skip
    assert said.count("serverside-applied") == len(objects), said
    for kind in ("podmonitor", "prometheusrule", "securitycontextconstraints"):
        assert f"{kind}." in said


def sized(**cpus: tuple[str, str]) -> dict[str, Any]:
    """Return a pod of the family's class; CPU requests and limits by container."""
    containers = [
        {
            "name": name,
            "image": "none",
            "resources": {
                "requests": {"cpu": request, "memory": "64Mi"},
                "limits": {"cpu": limit, "memory": "64Mi"},
            },
        }
        for name, (request, limit) in cpus.items()
    ]
    spec = {"runtimeClassName": "kata-sized", "containers": containers}
    metadata = {"generateName": "sized-", "namespace": "sizes"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_pods_get_the_class_of_their_size(cluster: ControlPlane) -> None:
    """A Guaranteed pod with whole CPUs; others keep the family's class, as does a size that none
    has. Off by default."""
    chart = str(CHARTS / "kata-pin")
    template = ("template", SPACE, chart, "-n", SPACE, "--kube-version", "1.34.1")
    only = ("--show-only", "templates/kata-classes.yaml")
    api = ("--api-versions", "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy")
    assert "kata-classes" not in cluster.run("helm", *template, *api).stdout
    on = ("--set", "kataClasses.enabled=true")
    plain = list(yaml.safe_load_all(cluster.run("helm", *template, *only, *on).stdout))
    assert [one["kind"] for one in plain] == ["RuntimeClass"] * 5
    text = cluster.run("helm", *template, *only, *on, *api).stdout
    cluster.kubectl("apply", "--server-side", "--validate=strict", "-f", "-", given=text)
    cluster.kubectl("create", "namespace", "sizes")
    cluster.kubectl("create", "serviceaccount", "default", "-n", "sizes")

    def made(**cpus: tuple[str, str]) -> dict[str, Any]:
        asked = ("create", "--dry-run=server", "-o", "json", "-f", "-")
        pod = json.loads(cluster.kubectl(*asked, given=json.dumps(sized(**cpus))))
        spec: dict[str, Any] = pod["spec"]
        return spec

    prefix = "kata-qemu-runtime-rs-cpus-"
    wait_for(lambda: made(a=("4", "4"))["runtimeClassName"] == f"{prefix}4", "the policy", 60)
    four = made(a=("4", "4"))
    assert four["overhead"] == {"cpu": "250m", "memory": "320Mi"}
    assert four["nodeSelector"] == {f"kata-pin.io/{prefix}4": "true"}
    for size, cpus in (
        ("2", {"a": ("1", "1"), "b": ("1000m", "1000m"), "c": ("500m", "500m")}),
        ("8", {"a": ("8", "8")}),
    ):
        assert made(**cpus)["runtimeClassName"] == prefix + size
    for cpus in ({"a": ("3", "3")}, {"a": ("500m", "500m")}, {"a": ("1", "4")}):
        assert made(**cpus)["runtimeClassName"] == "kata-sized", cpus
    cluster.kubectl("delete", "-f", "-", given=text)


# ---- the reporter's rights -------------------------------------------------------------------


class Intruder:
    """What can be done with a reporter's token, by kubectl."""

    def __init__(self, cluster: ControlPlane, token: Path) -> None:
        self._cluster = cluster
        self._flags = [
            *("--token", token.read_text(), "--server", cluster.url),
            *("--certificate-authority", str(cluster.ca), "--kubeconfig", "/dev/null"),
        ]

    def tries(self, *arguments: str, given: Mapping[str, Any] | None = None) -> str:
        """Return what kubectl says, output and error."""
        text = None if given is None else json.dumps(given)
        return self._cluster.kubectl(*self._flags, *arguments, given=text, check=False)


def placement(name: str) -> dict[str, Any]:
    """Return a NodePlacement without a status."""
    return {
        "apiVersion": "kata-pin.io/v1alpha1",
        "kind": "NodePlacement",
        "metadata": {"name": name},
    }


def event(node: str, controller: str = "kata-pin.io/reporter", kind: str = "Pod") -> dict[str, Any]:
    """Return an Event of a node's reporter."""
    return {
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "type": "Warning",
        "metadata": {"name": f"e-{node}-{kind.lower()}-{len(controller)}", "namespace": "shop"},
        "eventTime": "2026-11-23T04:00:00.000000Z", "reason": "CPUIsolationBroken",
        "action": "Testing", "note": "x",
        "reportingController": controller, "reportingInstance": node,
        "regarding": {"apiVersion": "v1", "kind": kind, "name": "web", "namespace": "shop"},
    }  # fmt: skip


def test_a_token_writes_its_own_nodes_object_only(cluster: ControlPlane, tmp_path: Path) -> None:
    """The admission policy refuses another node's object, Events of others, and deletion."""
    token = node_pod(cluster, "own", tmp_path)
    cluster.node("other")
    cluster.apply(placement("other"))
    intruder = Intruder(cluster, token)
    apply = ("apply", "--server-side", "--field-manager=x", "-f", "-")
    wait_for(
        lambda: (
            "may not write the object of other" in intruder.tries(*apply, given=placement("other"))
        ),
        "the admission policy to be in force",
        60,
    )
    assert "serverside-applied" in intruder.tries(*apply, given=placement("own"))
    status = json.loads(encode_placement("other", "", NOTHING_KNOWN))
    said = intruder.tries(*apply, "--subresource=status", given=status)
    assert "may not write the object of other" in said
    for pod, allowed in (("kube-system/etcd-own", False), (f"{SPACE}/{SPACE}-other", False),
                         (f"evil/{SPACE}-own", False), (f"{SPACE}/{SPACE}-own", True)):  # fmt: skip
        status = json.loads(encode_placement("own", "", replace(NOTHING_KNOWN, daemon_pod=pod)))
        said = intruder.tries(*apply, "--subresource=status", given=status)
        assert ("serverside-applied" in said) is allowed, said
        assert allowed or f"its own is {SPACE}/{SPACE}-own" in said
    create = ("create", "--validate=false", "-f", "-")
    assert "created" in intruder.tries(*create, given=event("own"))
    assert "only Events of its own" in intruder.tries(*create, given=event("other"))
    assert "only Events of its own" in intruder.tries(*create, given=event("own", "kubelet"))
    assert "only Events of its own" in intruder.tries(*create, given=event("own", kind="Node"))
    killing = event("own") | {"reason": "Killing"}
    related = event("own") | {"related": {"kind": "Node", "name": "own"}}
    for given in (killing, related):
        assert "only Events of its own" in intruder.tries(*create, given=given)
    kept = event("own")
    kept["metadata"] = kept["metadata"] | {"name": "kept", "finalizers": ["x.example/y"]}
    assert "sets no finalizer" in intruder.tries(*create, given=kept)
    for what in (("delete", "npl", "own"), ("get", "nodes"), ("get", "secrets", "-A"),
                 ("get", "pods", "-n", SPACE), ("get", "npl")):  # fmt: skip
        assert "orbidden" in intruder.tries(*what), what


async def test_a_token_leaves_its_objects_metadata_alone(
    cluster: ControlPlane, tmp_path: Path
) -> None:
    """A finalizer would keep the object, and the definition with it, when the chart is removed."""
    api = api_of(cluster, node_pod(cluster, "meta", tmp_path))
    await api.apply("meta", "uid-1", NOTHING_KNOWN)
    cluster.kubectl("label", "npl", "meta", "team=x")
    await api.apply("meta", "uid-1", NOTHING_KNOWN)  # others' labels are in nobody's way
    node = {"apiVersion": "v1", "kind": "Node", "uid": "x"}
    for change, said in (
        ({"finalizers": ["x.example/y"]}, "no finalizer"),
        ({"ownerReferences": [node | {"name": "other"}]}, "no owner but its node"),
        ({"ownerReferences": [node | {"name": "meta", "kind": "Pod"}]}, "no owner but its node"),
        ({"labels": {"team": "y"}}, "neither labels nor annotations"),
        ({"annotations": {"a": "b"}}, "neither labels nor annotations"),
    ):
        path = "/apis/kata-pin.io/v1alpha1/nodeplacements/meta"
        with pytest.raises(ApiRefused, match=said):
            await api._write("PATCH", path, encode({"metadata": change}), MERGE)


# ---- what the reporter may do beside its own object ---------------------------------------------

TAINT = "kata-pin.io/starting"
TOPOLOGIES = "noderesourcetopologies.topology.node.k8s.io"


@pytest.fixture
def duties(cluster: ControlPlane) -> Iterator[ControlPlane]:
    """The chart with both values; afterwards with its own again."""
    chart = str(CHARTS / "kata-pin")
    define(cluster, "noderesourcetopologies")
    values = f"reporter.startupTaint={TAINT},reporter.nodeResourceTopology=true"
    cluster.run("helm", "upgrade", SPACE, chart, "-n", SPACE, "--set", values)
    yield cluster
    cluster.run("helm", "upgrade", SPACE, chart, "-n", SPACE, "--reset-values")


def api_of(cluster: ControlPlane, token: Path) -> ApiServer:
    """Return a client with a reporter's token."""
    return ApiServer(HttpClient(cluster.url, token=str(token), ca=str(cluster.ca)))


async def test_the_startup_taint(duties: ControlPlane, tmp_path: Path) -> None:
    """The token removes this taint from its own node, and changes nothing else of any node."""
    token = node_pod(duties, "fresh", tmp_path)
    duties.node("later")
    for name in ("fresh", "later"):
        taints = (f"{TAINT}=:NoSchedule", "other=x:NoExecute")
        duties.kubectl("taint", "node", name, *taints, "--overwrite")
    api = api_of(duties, token)

    async def patch(name: str, change: dict[str, Any], path: str = "") -> str:
        """Return how a change is refused; kubectl would read the object first."""
        try:
            await api._write("PATCH", f"/api/v1/nodes/{name}{path}", encode(change), MERGE)
        except ApiRefused as error:
            return error.message
        return ""

    said = ""
    for _ in range(60):  # the new right is in force after a moment, the policy perhaps after it
        said = await patch("later", {"metadata": {"annotations": {"a": "b"}}})
        if "may not write the object of later" in said:
            break
        await asyncio.sleep(1)
    assert "may not write the object of later" in said
    assert "may not write the object of later" in await patch("later", {"spec": {"taints": []}})
    refused = "changes nothing of a node but its startup taint"
    assert refused in await patch("fresh", {"spec": {"taints": []}})
    assert refused in await patch("fresh", {"metadata": {"labels": {"a": "b"}}})
    assert refused in await patch("fresh", {"metadata": {"annotations": {"a": "b"}}})
    assert refused in await patch("fresh", {"spec": {"unschedulable": True}})
    assert refused in await patch("fresh", {"spec": {"providerID": "x://y"}})
    network = {"podCIDR": "10.0.0.0/8", "podCIDRs": ["10.0.0.0/8"]}
    assert refused in await patch("fresh", {"spec": network})
    assert "HTTP 403" in await patch("fresh", {"status": {"phase": "x"}}, "/status")
    assert "orbidden" in Intruder(duties, token).tries("get", "node", "fresh")
    await StartupTaint(api, "fresh", TAINT).run(ready=True)

    def keys(name: str) -> set[str]:  # Kubernetes itself adds one to a new node
        return {one["key"] for one in duties.get("node", name)["spec"]["taints"]}

    assert keys("later") - keys("fresh") == {TAINT}
    assert "other" in keys("fresh")
    assert not await api.remove_taint("fresh", TAINT)


async def test_the_node_resource_topology(duties: ControlPlane, tmp_path: Path) -> None:
    """Written for its own node; whoever else writes the zones is left alone, early or late."""
    token = node_pod(duties, "zoned", tmp_path)
    node_pod(duties, "exported", tmp_path)
    theirs = {
        "apiVersion": "topology.node.k8s.io/v1alpha2", "kind": "NodeResourceTopology",
        "metadata": {"name": "exported"}, "zones": [{"name": "theirs", "type": "Node"}],
    }  # fmt: skip
    apply = ("apply", "--server-side", "--field-manager=nfd", "--force-conflicts", "-f", "-")
    duties.kubectl(*apply, given=json.dumps(theirs))
    api = api_of(duties, token)
    ours = Topology(api, "zoned", "", _zones=(Zone(0, 4, 4, 2), Zone(1, 4, 4, 4)))

    async def written() -> bool:
        with contextlib.suppress(ApiRefused):
            await ours.run()
        return bool(ours._written)

    for _ in range(30):  # the new right and policy are in force after a moment
        if await written():
            break
        await asyncio.sleep(1)
    zones = duties.get(TOPOLOGIES, "zoned")["zones"]
    assert [(one["name"], one["resources"][0]["available"]) for one in zones] == [
        ("node-0", "2"), ("node-1", "4"),
    ]  # fmt: skip
    with pytest.raises(ApiRefused, match="may not write the object of later"):
        await api.apply_topology("later", "", ours._zones)
    other = Topology(
        api_of(duties, tmp_path / "exported.token"), "exported", "", _zones=ours._zones
    )
    await other.run()
    assert other.other_writer == "nfd"
    taken = {**theirs, "metadata": {"name": "zoned"}}
    duties.kubectl(*apply, given=json.dumps(taken))
    ours._zones = (Zone(0, 4, 4, 1),)
    await ours.run()
    assert ours.other_writer
    for name in ("zoned", "exported"):
        assert duties.get(TOPOLOGIES, name)["zones"][0]["name"] == "theirs"


# ---- a real daemon, its reporter, and the plugin ---------------------------------------------


@contextlib.contextmanager
def reporting(cluster: ControlPlane, node: Node, name: str, token: Path) -> Iterator[None]:
    """Run `kata-pin reporter` beside a daemon."""
    log = node.root / "reporter.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            [
                *(str(PROGRAM), "--config", str(node.config), "reporter", "--node", name),
                *("--listen", "127.0.0.1:0", "--api", cluster.url, "--token", str(token)),
                *("--ca", str(cluster.ca)),
            ],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        yield
    except BaseException as error:
        error.add_note(log.read_text()[-3000:])
        raise
    finally:
        process.terminate()
        assert process.wait(20) == 0


class NamedPod(Pod):
    """A sandbox whose pod has a name and a uid as Kubernetes gives them."""

    def __init__(self, node: Node, name: str) -> None:
        super().__init__(node, KataSandbox(node.dirs, node.id_of(name)))
        self.name = name

    def write_bundle(self, container_id: str, cpus: str | None = None, **options: Any) -> Path:
        """Write the bundle with these."""
        bundle = super().write_bundle(container_id, cpus, **options)
        config = json.loads((bundle / "config.json").read_text())
        named = {"sandbox-name": self.name, "sandbox-uid": f"uid-{self.name}"}
        config["annotations"] |= {f"io.kubernetes.cri.{key}": one for key, one in named.items()}
        (bundle / "config.json").write_text(json.dumps(config))
        return bundle

    def run_exclusively(self, container_id: str, cpus: str) -> None:
        """Announce the sandbox, and create a container with exclusive pCPUs."""
        self.announce()
        self.create(container_id, cpus, exclusive=True)


@pytest.mark.qemu
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_real_daemon_in_the_cluster(cluster: ControlPlane, tmp_path: Path) -> None:
    """Its object, one Event on each pod of a conflict, and what the plugin shows of both."""
    token = node_pod(cluster, "worker-7", tmp_path)

    def until(what: str, holds: Any) -> Any:
        def look() -> Any:
            found = cluster.run("kubectl", "get", "npl", "worker-7", "-o", "json", check=False)
            one = json.loads(found.stdout).get("status") if found.returncode == 0 else None
            return one if one and holds(one) else None

        return wait_for(look, what, 90)

    with private_node() as node:
        node.start()
        with NamedPod(node, "p1") as first, NamedPod(node, "p2") as second:
            first.run_exclusively("c1", "1")
            node.wait_state("p1", "ok")
            with reporting(cluster, node, "worker-7", token):
                found = until("the object", lambda one: one["exclusive"])
                assert (found["exclusive"], found["exclusiveCount"]) == ("1", 1)
                owner = cluster.get("npl", "worker-7")["metadata"]["ownerReferences"][0]
                uid = cluster.get("node", "worker-7")["metadata"]["uid"]
                assert (owner["kind"], owner["uid"]) == ("Node", uid)
                columns = cluster.kubectl("get", "npl", "worker-7").split("\n")[0].split()
                assert columns[:5] == ["NAME", "READY", "EXCLUSIVE", "FREE", "SANDBOXES"]
                second.run_exclusively("c2", "1")
                found = until("the conflict", lambda one: one["violations"] >= 2)
                assert {one["kind"] for one in found["violationList"]} >= {"conflict"}
                wait_for(lambda: len(events(cluster)) >= 2, "an Event on each pod", 60)
                check_plugin(cluster)
            with reporting(cluster, node, "worker-7", token):  # a new one goes on with the series
                again = ("a second count", 60)
                wait_for(lambda: all(one.get("series") for one in events(cluster)), *again)
                assert len(events(cluster)) == 2
                assert node.daemon is not None
                node.daemon.terminate()
                gone = until("not ready", lambda one: one["conditions"][0]["status"] == "False")
                assert gone["conditions"][0]["reason"] == "DaemonAway"
                assert gone["exclusive"] == "1"


def events(cluster: ControlPlane) -> list[dict[str, Any]]:
    """Return the Events of real reporters on pods."""
    found = cluster.get("events.events.k8s.io", "-n", "shop")["items"]
    return [one for one in found if one["reason"] == "ExclusiveCPUConflict"]


def plugin(cluster: ControlPlane, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `kubectl kata-pin`."""
    folder = PROJECT / "hooks" / "kubectl"
    return subprocess.run(
        [str(programs() / "kubectl"), "kata-pin", *arguments],
        capture_output=True, text=True, check=False, timeout=60,
        env={**cluster.environment, "PATH": f"{folder}:{programs()}:{os.environ['PATH']}"},
    )  # fmt: skip


def check_plugin(cluster: ControlPlane) -> None:
    """Look at the nodes and pods with the plugin."""
    done = plugin(cluster, "nodes")
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split()[:3] == ["NODE", "READY", "EXCLUSIVE"]
    assert [row.split()[:3] for row in rows if row.startswith("worker-7")] == [
        ["worker-7", "True", "1"]
    ]
    name = "p1"
    done = plugin(cluster, "pods", "-n", "shop", "-o", "json")
    found = {one["name"]: one for one in json.loads(done.stdout)["pods"]}
    assert (found[name]["state"], found[name]["exclusive"]) == ("conflict", "1")
    assert name in plugin(cluster, "pods", "-A").stdout
    done = plugin(cluster, "pods", "-n", "nowhere")
    assert "no pod of a sandbox in namespace nowhere" in done.stderr
    done = plugin(cluster, "show", "-n", "shop", "nothing")
    assert (done.returncode, "no sandbox of pod shop/nothing" in done.stderr) == (1, True)
    named = cluster.get("npl", "worker-7")["status"]["daemonPod"]
    assert named == f"{SPACE}/{SPACE}-worker-7"
    done = plugin(cluster, "show", "-n", "shop", name)  # no kubelet: the pod's node has no address
    assert (done.returncode, "no preferred addresses" in done.stderr) == (1, True), done.stderr
    assert f"shop/{name}" in plugin(cluster, "__complete", "show", "").stdout
    assert plugin(cluster, "nodes", "nope").returncode == 1


# ---- helm's life cycle -----------------------------------------------------------------------


def test_upgrade_and_uninstall(cluster: ControlPlane, tmp_path: Path) -> None:
    """An upgrade rolls out; an uninstall first has every node released, and files of classes
    removed, then removes everything."""
    chart = str(CHARTS / "kata-pin")
    before = cluster.get("daemonset", SPACE, "-n", SPACE)["metadata"]["generation"]
    values = "config.log_level=debug,kataClasses.enabled=true,kataClasses.nodes=true"
    cluster.run("helm", "upgrade", SPACE, chart, "-n", SPACE, "--set", values)
    assert cluster.get("daemonset", SPACE, "-n", SPACE)["metadata"]["generation"] == before + 1
    said: list[str] = []
    controller = threading.Thread(target=_play_controllers, args=(cluster, tmp_path, said))
    controller.start()
    try:
        done = cluster.run(
            "helm", "uninstall", SPACE, "-n", SPACE, "--timeout", "100s", check=False
        )
    finally:
        controller.join(120)
    assert done.returncode == 0, (done.stderr, said)
    assert said[-2:] == ["2 of 2 nodes released", "exit 0"], said
    for kind in ("daemonset", "clusterrole", "validatingadmissionpolicy", "crd", "sa", "role"):
        listed = (kind, "-A", "-o", "name")
        wait_for(lambda: SPACE not in cluster.kubectl("get", *listed), f"no {kind}", 60)  # noqa: B023
    install(cluster)  # for the other tests, whatever their order


def _play_controllers(cluster: ControlPlane, folder: Path, said: list[str]) -> None:
    """Do what a Job's pod and the DaemonSet's controller do during the uninstall."""
    job = ("get", "job", f"{SPACE}-undo", "-n", SPACE, "-o", "json")
    wait_for(lambda: cluster.run("kubectl", *job, check=False).returncode == 0, "the Job", 60)
    (undo,) = json.loads(cluster.kubectl(*job))["spec"]["template"]["spec"]["containers"]
    token = folder / "undo.token"
    token.write_text(cluster.kubectl("create", "token", f"{SPACE}-undo", "-n", SPACE).strip())
    rollout = subprocess.Popen(
        [
            *(str(PROGRAM), *undo["args"], "--timeout", "90s"),
            *("--api", cluster.url, "--token", str(token), "--ca", str(cluster.ca)),
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip

    def patched() -> bool:
        template = cluster.get("daemonset", SPACE, "-n", SPACE)["spec"]["template"]["spec"]
        return "lifecycle" in template["containers"][0]

    wait_for(patched, "the rollout", 60)
    pod = cluster.get("daemonset", SPACE, "-n", SPACE)["spec"]["template"]["spec"]
    check, writer = pod["initContainers"]
    assert writer["args"] == ["kata-class", "--remove", "--chroot=/host"]
    assert (writer["image"], check["args"]) == (check["image"], ["config", "check"])
    generation = cluster.get("daemonset", SPACE, "-n", SPACE)["metadata"]["generation"]
    counts = dict.fromkeys(
        (
            "desiredNumberScheduled",
            "currentNumberScheduled",
            "updatedNumberScheduled",
            "numberReady",
        ),
        2,
    )
    rolled = {"status": {**counts, "numberMisscheduled": 0, "observedGeneration": generation}}
    _patch_status(cluster, f"daemonset/{SPACE}", rolled)
    output, _ = rollout.communicate(timeout=90)
    said += [*output.splitlines(), f"exit {rollout.returncode}"]
    now = "2026-11-23T04:00:00Z"
    ended = [
        {"type": kind, "status": "True", "lastProbeTime": now, "lastTransitionTime": now}
        for kind in ("SuccessCriteriaMet", "Complete")
    ]
    complete = {
        "status": {"conditions": ended, "succeeded": 1, "startTime": now, "completionTime": now}
    }
    _patch_status(cluster, f"job/{SPACE}-undo", complete)


def _patch_status(cluster: ControlPlane, what: str, patch: dict[str, Any]) -> None:
    cluster.kubectl(
        "patch", what, "-n", SPACE, "--subresource=status", "--type=merge", "-p", json.dumps(patch)
    )
