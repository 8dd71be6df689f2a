"""The objects that the reporter writes, and the little that it reads (docs/cluster.md)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from kata_pin.base.documents.document import Cpus
from kata_pin.base.errors import ParseError
from kata_pin.base.json_text import Fields, load_fields
from kata_pin.base.values import SandboxState
from kata_pin.service.protocol import as_data, encode

# The NodePlacement object: what the API server shows of one node (docs/cluster.md).
#
# The custom resource's schema is made from these classes (scripts/schema); the comment at a field
# is its description there, and names are written in camel case. The object is bounded: a node with
# any number of sandboxes, whatever their names, has one of 640 KiB at most.

MAX_PODS: Final = 256
"""Most sandboxes that an object names."""

MAX_VIOLATIONS: Final = 32
"""Most violations that an object describes."""

MAX_NODES: Final = 64
"""Most NUMA nodes whose free pCPUs are listed."""

MAX_TEXT: Final = 256
"""Longest text, in characters; a cpu list may be longer."""

MAX_CPUS: Final = 1024
"""Longest cpu list, in characters."""

MAX_POD_CPUS: Final = 128
"""Longest cpu list of one sandbox."""


FreeSource = Literal["allocator", "kubelet", "unclaimed"]
"""What the free pCPUs are."""


class FreeCpus(Struct, frozen=True):
    """Free pCPUs of one NUMA node."""

    node: int  #: NUMA node
    count: int  #: number of free pCPUs
    cpus: Cpus  #: the free pCPUs


class Violation(Struct, frozen=True):
    """Something that breaks the isolation of a sandbox, or may."""

    #: `conflict`: another sandbox claims the same exclusive pCPU; `foreign-tasks`: others ran on an
    #: exclusive pCPU; `drift`: threads are not where they should be
    kind: Literal["conflict", "foreign-tasks", "drift", "no-vmm"]
    pod: str  #: `namespace/name`; the sandbox id if no pod is known
    sandbox: str  #: sandbox id
    message: str  #: the same in words


class PodPlacement(Struct, frozen=True):
    """One sandbox: its pod and its pCPUs."""

    pod: str  #: `namespace/name`; the sandbox id if no pod is known
    sandbox: str  #: sandbox id
    state: SandboxState  #: whether it is as it should be
    exclusive: Cpus  #: its exclusive pCPUs
    shared: Cpus  #: its shared pCPUs


class Condition(Struct, frozen=True):
    """A condition as Kubernetes' own objects have them."""

    type: str  #: `Ready`: whether the node's daemon answers and has checked every sandbox
    status: Literal["True", "False", "Unknown"]  #: whether it holds
    reason: str  #: the reason in one word
    message: str  #: the reason in a sentence
    last_transition_time: str  #: when `status` changed


class NodeStatus(Struct, frozen=True):
    """The status of a NodePlacement object."""

    version: str  #: the daemon's version; empty: it did not answer yet
    mode: Literal["act", "observe", ""]  #: empty: unknown
    online: Cpus  #: online pCPUs of the node
    exclusive: Cpus  #: pCPUs that are exclusive to a container, no matter who assigned them
    exclusive_count: int  #: number of these
    free: tuple[FreeCpus, ...]  #: pCPUs that no container has exclusively, by NUMA node
    free_by_node: str  #: the same in one line: `0:12 1:8`
    #: what the free pCPUs are; `allocator`: kata-pin may grant them; `kubelet`: its default set,
    #: which includes the CPUs that it reserves; `unclaimed`: all others
    free_source: FreeSource
    sandboxes: int  #: number of sandboxes
    sandboxes_ok: int  #: number of sandboxes whose threads are where they should be
    pods: tuple[PodPlacement, ...]  #: the sandboxes, those with a problem first
    pods_omitted: int  #: number of sandboxes that are not listed
    violations: int  #: number of violations
    violation_list: tuple[Violation, ...]  #: the first of them
    #: when every sandbox had been checked; written with other changes, else every five minutes
    last_audit: str | None
    conditions: tuple[Condition, ...]  #: `Ready`
    #: `namespace/name` of the pod with the node's daemon, where `kubectl kata-pin` asks for details
    daemon_pod: str | None = None


class PodEvent(Struct, frozen=True):
    """Something that is reported as an Event on a pod."""

    kind: str  #: the Event's reason, such as `ExclusiveCPUConflict`
    sandbox: str  #: sandbox id, or the container's where there is no sandbox
    pod: str  #: `namespace/name`
    pod_uid: str  #: the pod's uid
    note: str  #: what happened
    action: str  #: what kata-pin was doing


# What a NodeResourceTopology object says of one NUMA node (topology.node.k8s.io/v1alpha2).


class Zone(Struct, frozen=True):
    """A NUMA node with its pCPUs: all, those that containers may get, and those that are free."""

    node: int
    capacity: int
    allocatable: int
    available: int


# Written: NodePlacement (kata-pin.io/v1alpha1), Event (events.k8s.io/v1), a Node without a taint,
# and NodeResourceTopology (topology.node.k8s.io/v1alpha2). Read: the claims of our own service
# account's token (JWT, RFC 7519; the claim `kubernetes.io` names the node since Kubernetes 1.30),
# Status (the body of a refusal), an Event's series, a Node's taints and the managers of fields.
# Source: Kubernetes API reference.

GROUP: Final = "kata-pin.io/v1alpha1"
KIND: Final = "NodePlacement"
TOPOLOGY_GROUP: Final = "topology.node.k8s.io/v1alpha2"
MAX_TAINTS: Final = 256
NODE_ROOT: Final = "/host"
"""Where the chart mounts the node's file system for the container `kata-classes`."""

CONTROLLER: Final = "kata-pin.io/reporter"
"""`reportingController` of our Events."""

MAX_TOKEN: Final = 16 * 1024
MAX_ANSWER: Final = 2 * 1024 * 1024
"""Longest answer of the API server that is read: our own objects, of 640 KiB at most, are shorter,
also as Go writes them (it escapes `<`), with their managers."""

MAX_COUNT: Final = 2**31 - 1
MAX_GENERATION: Final = 2**63 - 1
_TEXT: Final = 300
"""Longest text of a refusal that is kept: an admission policy names itself twice at first."""

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""A DNS subdomain (RFC 1123), as names of nodes and pods are."""


class TokenClaims(Struct, frozen=True):
    """What a service account's token says of itself; empty where it does not."""

    node: str = ""
    node_uid: str = ""
    pod: str = ""
    """`namespace/name`"""


def is_object_name(text: str) -> bool:
    """Whether a text can be the name of a node or a pod."""
    return _NAME.fullmatch(text) is not None


def parse_token(token: bytes) -> TokenClaims:
    """Return the claims of our own token, unverified; ParseError if it is none.

    It says nothing about node or pod where it is not bound to them.
    """
    if len(token) > MAX_TOKEN:
        raise ParseError(f"longer than {MAX_TOKEN} bytes", source="token")
    parts = token.strip().split(b".")
    if len(parts) != 3:
        raise ParseError("not a JWT: not three parts", source="token")
    try:
        payload = base64.b64decode(parts[1] + b"=" * (-len(parts[1]) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ParseError("not a JWT: not base64", source="token") from error
    about = load_fields(payload, source="token", limit=MAX_TOKEN).fields("kubernetes.io")
    node, pod = about.fields("node"), about.fields("pod").text("name", limit=253)
    namespace = about.text("namespace", limit=63)
    return TokenClaims(
        node=node.text("name", limit=253),
        node_uid=node.text("uid", limit=64),
        pod=f"{namespace}/{pod}" if pod and namespace else "",
    )


def parse_refusal(body: bytes) -> str:
    """Return the message of a Status, clipped and printable; empty if it is something else."""
    try:
        fields = load_fields(body, source="answer", limit=MAX_ANSWER)
        text = fields.text("message", limit=MAX_ANSWER) if fields.text("kind") == "Status" else ""
    except ParseError:
        return ""
    return "".join(one if one.isprintable() else " " for one in text[:_TEXT])


def parse_series(body: bytes) -> int:
    """Return how often an Event was reported, 1 without a series; raises ParseError."""
    fields = load_fields(body, source="event", limit=MAX_ANSWER)
    return fields.fields("series").number("count", 0, MAX_COUNT) or 1


def parse_rollout(body: bytes) -> tuple[int, int, int]:
    """Return of a DaemonSet how many pods it wants, has updated and has ready; raises ParseError.

    None is updated or ready while its controller has not seen the newest specification.
    """
    fields = load_fields(body, source="daemonset", limit=MAX_ANSWER)
    status, metadata = fields.fields("status"), fields.fields("metadata")
    wanted = status.number("desiredNumberScheduled", 0, MAX_COUNT) or 0
    updated = status.number("updatedNumberScheduled", 0, MAX_COUNT) or 0
    ready = status.number("numberReady", 0, MAX_COUNT) or 0
    seen = status.number("observedGeneration", 0, MAX_GENERATION) or 0
    newest = metadata.number("generation", 0, MAX_GENERATION) or 0
    return (wanted, updated, ready) if seen >= newest else (max(1, wanted), 0, 0)


def encode_release(*, classes: bool = False) -> bytes:
    """Return the strategic merge patch that has each daemon's pod release its node at its start.

    All nodes at once: nothing is pinned any more that a daemon would have to watch over. `classes`:
    the container that writes files of `kata-class` removes them.
    """
    step = {"exec": {"command": ["/usr/bin/kata-pin", "release", "--wait", "60s"]}}
    daemon = {"name": "daemon", "lifecycle": {"postStart": step}}
    rolling = {"rollingUpdate": {"maxUnavailable": "100%"}}
    pod: dict[str, object] = {"containers": [daemon]}
    if classes:
        remove = ["kata-class", "--remove", f"--chroot={NODE_ROOT}"]
        pod["initContainers"] = [{"name": "kata-classes", "args": remove}]
    return encode({"spec": {"updateStrategy": rolling, "template": {"spec": pod}}})


def encode_placement(node: str, node_uid: str, status: NodeStatus | None) -> bytes:
    """Return a NodePlacement to be applied: with `status` its status alone, else the rest of it."""
    metadata = _metadata(node, node_uid if status is None else "")
    whole: dict[str, object] = {"apiVersion": GROUP, "kind": KIND, "metadata": metadata}
    if status is not None:
        whole["status"] = _camel(as_data(status))
    return encode(whole)


def _metadata(node: str, node_uid: str) -> dict[str, object]:
    """Return the metadata of an object that a node owns, if its uid is known."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}
    return {"name": node} | ({"ownerReferences": [owner]} if node_uid else {})


def encode_event(event: PodEvent, *, name: str, node: str, when: str) -> bytes:
    """Return an Event on a pod; `when` has microseconds."""
    namespace, _, pod = event.pod.partition("/")
    return encode(
        {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": when,
            "reportingController": CONTROLLER,
            "reportingInstance": node[:128],
            "type": "Warning",
            "reason": event.kind,
            "action": event.action,
            "note": event.note,
            "regarding": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": namespace,
                "name": pod,
                "uid": event.pod_uid,
            },
        }
    )


def encode_taint_removal(node: bytes, key: str) -> bytes:
    """Return the JSON patch that removes a Node's taints with a key, empty where it has none.

    It fails where somebody changed the taints meanwhile (RFC 6902, `test`). Raises ParseError.
    """
    taints = (
        load_fields(node, source="node", limit=MAX_ANSWER)
        .fields("spec")
        .items("taints", limit=MAX_TAINTS)
    )
    patch: list[dict[str, object]] = []
    for position in reversed(range(len(taints))):
        if Fields(taints[position], source="node: taint").text("key") == key:
            path = f"/spec/taints/{position}"
            patch.append({"op": "test", "path": path, "value": taints[position]})
            patch.append({"op": "remove", "path": path})
    return encode(patch) if patch else b""


def parse_writers(body: bytes, field: str) -> frozenset[str]:
    """Return the managers of a field of an object, written as in fieldsV1; raises ParseError."""
    metadata = load_fields(body, source="object", limit=MAX_ANSWER).fields("metadata")
    return frozenset(
        one.text("manager")
        for one in metadata.objects("managedFields")
        if field in one.fields("fieldsV1")
    )


def encode_topology(node: str, node_uid: str, zones: Sequence[Zone]) -> bytes:
    """Return a NodeResourceTopology to be applied."""
    metadata = _metadata(node, node_uid)
    metadata["labels"] = {"app.kubernetes.io/managed-by": "kata-pin"}
    listed = [
        {
            "name": f"node-{zone.node}",
            "type": "Node",
            "resources": [
                {
                    "name": "cpu",
                    "capacity": str(zone.capacity),
                    "allocatable": str(zone.allocatable),
                    "available": str(zone.available),
                }
            ],
        }
        for zone in zones
    ]
    kind = {"apiVersion": TOPOLOGY_GROUP, "kind": "NodeResourceTopology"}
    return encode({**kind, "metadata": metadata, "zones": listed})


def encode_series(count: int, when: str) -> bytes:
    """Return the merge patch that says that an Event was reported again."""
    return encode({"series": {"count": count, "lastObservedTime": when}})


def _camel(value: object) -> object:
    """Return data with keys in camel case, and without what is null."""
    if isinstance(value, Mapping):
        return {encode_name(key): _camel(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_camel(one) for one in value]
    return value


def encode_name(name: str) -> str:
    """Return a field's name as objects of Kubernetes have it."""
    first, *others = name.split("_")
    return first + "".join(one.capitalize() for one in others)
