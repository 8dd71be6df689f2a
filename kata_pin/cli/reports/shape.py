"""The state document's shape, for the type checker (docs/json.md has it in words).

The document comes from the daemon or from daemon/service/offline.py in this process; both are this
program, so it is checked for its version (client.py) and then believed in shape. Its texts are
not believed: pod names and thread names are tenants' words, see safetext.py.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, TypedDict

VERSION: Final = 1
"""The version of every document this command line reads and writes."""

Json: TypeAlias = "dict[str, Any]"


class Note(TypedDict):
    """Something the operator should know."""

    code: str
    text: str
    level: str


class Nri(TypedDict):
    """The connection to the runtime's NRI."""

    socket: str
    runtime: str
    connected_s: float | None
    problem: str


class Metrics(TypedDict):
    """Where metrics are served."""

    address: str
    problem: str


class Daemon(TypedDict, total=False):
    """Whether the daemon made the document; `reason` says why it did not."""

    running: bool
    pid: int
    version: str
    uptime_s: float
    reason: str
    nri: Nri | None
    metrics: Metrics | None


class CpuPlace(TypedDict):
    """One online pCPU and where it is."""

    cpu: int
    node: int
    package: int
    llc: int
    core: int
    thread: int
    kind: str


class Kubelet(TypedDict):
    """What the kubelet's checkpoint says."""

    policy: str
    default: str


class Node(TypedDict):
    """The node."""

    hostname: str
    kernel: str
    online: str
    present: str
    isolated: str
    nohz_full: str
    cpus: list[CpuPlace]
    kubelet: Kubelet | None
    live_threads: bool
    mode: str


class Told(TypedDict):
    """What one source told of a container's cpuset."""

    source: str
    cpus: str | None
    age_s: float
    believed: bool


class Container(TypedDict):
    """One recorded container."""

    id: str
    name: str
    kind: str
    state: str
    cpus: str | None
    mems: str
    exclusive: str
    provenance: str
    reason: str
    told: list[Told]
    told_reason: str
    source: str
    recorded_s: float | None
    quota_us: int | None
    period_us: int | None
    shares: int | None
    bundle: str
    note: str


class Vmm(TypedDict):
    """The accepted VMM process."""

    kind: str
    pid: int
    starttime: int
    exe: str
    exe_deleted: bool
    witness: str
    kvm: bool
    boot_vcpus: int
    max_vcpus: int
    orphan: bool
    guest_cid: int


class Known(TypedDict):
    """How well one link of the map is known."""

    state: str
    source: str


class GuestLinks(TypedDict):
    """The links from a vCPU thread to its guest CPU."""

    vcpu: Known
    apic_id: Known
    guest_cpu: Known


class GuestVcpu(TypedDict):
    """One vCPU thread and the guest CPU it is."""

    tid: int
    vcpu: int | None
    apic_id: int | None
    guest_cpu: int | None
    state: str
    source: str
    links: GuestLinks
    cpus: str
    paired: bool
    container: str


class GuestContainer(TypedDict):
    """The guest CPUs of one container."""

    id: str
    name: str
    cpus: str | None
    owned: bool
    reason: str
    told: str | None
    proof: str | None
    detail: str


class Guest(TypedDict):
    """The map of a sandbox, and what its guest was told."""

    state: str
    detail: str
    asked_s: float | None
    kernel: str
    kernel_source: str
    hotplugged: bool
    vcpus: list[GuestVcpu]
    containers: list[GuestContainer]


class Thread(TypedDict):
    """One thread that works for the sandbox."""

    tid: int
    tgid: int
    starttime: int
    comm: str
    role: str
    label: str
    source: str
    vcpu: int | None
    apic_id: int | None
    iothread: str
    conflict: str
    wanted: str | None
    applied: str | None
    step: str
    reason: str
    paired: bool
    container: str
    observed: str
    last_cpu: int
    cpu_ticks: int
    cgroup: str
    cpuset: str
    state: Literal["ok", "drift", "left", "released"]


class Writer(TypedDict):
    """Who else sets affinities of a sandbox's threads."""

    who: str
    acts: bool
    evidence: str
    seen: int
    since_s: float | None
    tids: list[int]


class Sandbox(TypedDict):
    """One sandbox."""

    id: str
    pod: str
    handler: str
    state: str
    mask: str | None
    mask_origin: str
    exclusive: str
    shared: str
    checked_s: float | None
    duration_ms: float | None
    containers: list[Container]
    vmm: Vmm | None
    vmm_problem: str
    guest: Guest | None
    threads: list[Thread]
    writers: list[Writer]
    notes: list[Note]


class Pools(TypedDict):
    """The CPUs of the node by use."""

    reserved: str
    housekeeping: str
    shared: str
    exclusive: str


Grant = TypedDict(
    "Grant",
    {
        "id": str,
        "kind": str,
        "name": str,
        "pod": str,
        "pod_uid": str,
        "sandbox": str,
        "kata": bool,
        "class": str,
        "policy": str,
        "cpus": str,
        "exclusive": str,
        "shared": str | None,
        "mems": str,
        "millis": int,
        "ordered": str | None,
        "written": str,
        "pending": str | None,
        "reasons": list[str],
    },
)
"""What our allocator gave one container, or a sandbox's VM."""


class Refused(TypedDict):
    """A container that did not get what it asked for."""

    time: str
    id: str
    container: str
    kind: str
    message: str
    strict: bool


class PushFailure(TypedDict):
    """A container that could not be changed when it was last tried."""

    id: str
    message: str


class Push(TypedDict):
    """How cpusets are sent between two calls of the runtime."""

    way: str
    reason: str
    problem: str
    failures: list[PushFailure]


class Allocation(TypedDict):
    """Our own allocator."""

    policy: str
    aside: str
    guarantee: str
    pools: Pools
    held_back: str
    grants: list[Grant]
    push: Push | None
    refusals: int
    refused: list[Refused]
    problems: list[str]
    notes: list[Note]


class State(TypedDict):
    """The whole document."""

    version: int
    kind: str
    time: str
    daemon: Daemon
    node: Node
    sandboxes: list[Sandbox]
    allocation: Allocation | None
    notes: list[Note]
