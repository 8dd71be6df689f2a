"""State documents made by hand: data for the renderers, in the shape of docs/json.md."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import msgspec
from msgspec.structs import replace

from kata_pin.base.counters import SeenTask
from kata_pin.base.cpuset import CpuPlace, CpuSet
from kata_pin.base.documents.answers import (
    Applied,
    BindDocument,
    Explanation,
    HistoryDocument,
)
from kata_pin.base.documents.check import CheckDocument, IntruderGroup
from kata_pin.base.documents.document import Daemon, Metrics, Note, Nri
from kata_pin.base.documents.measured import (
    HostProcess,
    MemoryDocument,
    ProcessThread,
    TopDocument,
    WhoDocument,
)
from kata_pin.base.documents.pools import Grant, Push
from kata_pin.base.documents.state import (
    Container,
    CpusetReport,
    DoctorDocument,
    Guest,
    GuestContainer,
    GuestLink,
    GuestLinks,
    GuestVcpu,
    Interface,
    Kubelet,
    Network,
    Node,
    Sandbox,
    State,
    Thread,
    VhostWorker,
    Vmm,
    Writer,
)
from kata_pin.base.values import CpusetSource, LinkState, NoteLevel
from kata_pin.cli.reports.findings import could_not_tell
from kata_pin.cli.reports.who import Intruder, grouped
from kata_pin.placement import remedies

DOCUMENTS = Path(__file__).parents[2] / "data/documents"


def places(count: int, *, nodes: int = 1, smt: bool = False) -> tuple[CpuPlace, ...]:
    """Return pCPUs numbered as Linux does: all first siblings, then all second ones."""
    cores = count // 2 if smt else count
    per_node = cores // nodes
    return tuple(
        CpuPlace(
            cpu=cpu,
            node=(cpu % cores) // per_node,
            package=(cpu % cores) // per_node,
            llc=(cpu % cores) // per_node * per_node,
            core=cpu % cores,
            thread=cpu // cores,
            kind="",
        )
        for cpu in range(count)
    )


T = TypeVar("T")


def recorded(name: str, kind: type[T]) -> T:
    """Return a document of tests/data/documents."""
    return msgspec.json.decode((DOCUMENTS / name).read_bytes(), type=kind)


PARTS = recorded("parts.json", dict[str, Any])


def part(kind: type[T], /, **fields: Any) -> T:
    """Return the part of a document that is recorded for its type, with other `fields`."""
    made = msgspec.convert(PARTS[kind.__name__], type=kind)
    return cast("T", replace(cast("msgspec.Struct", made), **fields))


def an_id(name: str) -> str:
    """Return an id that is the name in hexadecimal."""
    return name.encode().hex().ljust(64, "0")[:64]


NRI = Nri("/var/run/nri/nri.sock", "containerd v2.1.4", 93700.0, "")
METRICS = Metrics("unix:/run/kata-pin/metrics.sock", "")
RUNNING = Daemon(running=True, pid=812, version="0.1.0", uptime_s=93784.0, nri=NRI, metrics=METRICS)


def state(*sandboxes: Sandbox, cpus: int = 16, **node: Any) -> State:
    """Return a document; `node` overrides facts of the node."""
    places_ = places(cpus, nodes=2 if cpus > 4 else 1, smt=cpus > 4)
    facts = {"online": f"0-{cpus - 1}", "present": f"0-{cpus - 1}", "cpus": places_} | node
    return State(
        time="2026-11-20T21:00:00Z",
        daemon=RUNNING,
        node=part(Node, **facts),
        sandboxes=sandboxes,
        allocation=None,
        notes=(),
    )


def without_daemon(
    document: State, reason: str = "no daemon is listening on /run/kata-pin/status.sock"
) -> State:
    """Return the document as made without the daemon."""
    return replace(document, daemon=Daemon(running=False, reason=reason))


def note(text: str, *, warning: bool = True) -> Note:
    """Return a note."""
    return Note("test", text, NoteLevel.WARNING if warning else NoteLevel.INFO)


TAP = Interface("tap0_kata", "tap", 2, "eth0", True, (VhostWorker(4105, True),))


def networked(*, problem: str = "") -> State:
    """Return a state of one sandbox with its network, or with the reason why it is unknown."""
    interfaces = (TAP, Interface("eth0", "veth", 1, "tap0_kata"), Interface("x\x1b[31m", "", 1))
    network = Network(() if problem else interfaces, problem)
    return state(replace(database(), network=network))


def vmm(**fields: Any) -> Vmm:
    """Return a QEMU."""
    return part(Vmm, **fields)


def container(name: str, cpus: str | None, exclusive: str = "", **fields: Any) -> Container:
    """Return a running container."""
    given: dict[str, Any] = {"id": an_id(name), "name": name, "cpus": cpus, "exclusive": exclusive}
    given["cpusets"] = (CpusetReport(CpusetSource.BUNDLE, cpus, 75.0, used=True),)
    if exclusive:
        given |= {"provenance": "kubelet", "reason": "assigned by the static policy"}
    return part(Container, **given | fields)


def thread(tid: int, role: str, cpus: str, **fields: Any) -> Thread:
    """Return a thread that is where it should be."""
    given: dict[str, Any] = dict.fromkeys(("desired", "expected", "affinity"), cpus)
    given |= {"tid": tid, "role": role, "label": role, "last_cpu": min(CpuSet.parse(cpus))}
    if role == "vcpu":
        index = fields.get("vcpu")
        given |= {"label": f"vcpu {'?' if index is None else index}", "apic_id": index}
        given |= {"source": "debugfs", "reason": "paired with db", "paired": True}
    return part(Thread, **given | fields)


def sandbox(pod: str, mask: str | None, *threads: Thread, **fields: Any) -> Sandbox:
    """Return a sandbox whose threads are where they should be."""
    given: dict[str, Any] = {"id": an_id(pod), "pod": pod, "mask": mask, "shared": mask or ""}
    return part(Sandbox, **given | {"threads": threads} | fields)


def links(
    *numbers: tuple[int, str, int | None, str, str], first: int = 4101, **fields: Any
) -> Guest:
    """Return a guest's map: (vCPU, pCPUs, guest CPU, state, owner's id) each."""
    measured = (
        GuestLink(LinkState.MEASURED, "debugfs"),
        GuestLink(LinkState.MEASURED, "KVM's vCPU id"),
    )
    vcpus = [
        GuestVcpu(
            tid=first + n,
            vcpu=index,
            apic_id=index,
            guest_cpu=number,
            state=cast("LinkState", known),
            source=f"what is {known}",
            links=GuestLinks(*measured, GuestLink(cast("LinkState", known), f"what is {known}")),
            cpus=cpus,
            paired=bool(owner),
            container=owner,
        )
        for n, (index, cpus, number, known, owner) in enumerate(numbers)
    ]
    return part(Guest, vcpus=tuple(vcpus), **fields)


def confined(name: str, cpus: str | None, **fields: Any) -> GuestContainer:
    """Return the guest CPUs of a container, which its guest was told and read back."""
    given: dict[str, Any] = {"id": an_id(name), "name": name, "cpus": cpus, "applied": cpus}
    if cpus is None:
        given |= {"owned": False, "proof": None}
    return part(GuestContainer, **given | fields)


def disturbed() -> State:
    """Return a state with what disturbs its exclusive pCPUs."""
    return recorded("disturbed.json", State)


def kept() -> State:
    """Return a state with a sandbox whose pCPUs are kept quiet, but for one."""
    return recorded("kept.json", State)


def database() -> Sandbox:
    """Return a sandbox with exclusive pCPUs, shared ones, and everything in place."""
    return recorded("database.json", Sandbox)


def writer(name: str, **fields: Any) -> Writer:
    """Return another writer."""
    return part(Writer, name=name, **fields)


def drifted() -> Sandbox:
    """Return a sandbox with two threads off their CPUs."""
    return recorded("drifted.json", Sandbox)


def lost() -> Sandbox:
    """Return a sandbox whose VMM was not found, without a known pod."""
    return recorded("lost.json", Sandbox)


def large() -> State:
    """Return a node of 256 pCPUs with one sandbox of 64 vCPUs and many idle cores."""
    vcpus = [
        thread(7000 + n, "vcpu", str(16 + n), vcpu=n, last_cpu=16 + n, reason="paired with big")
        for n in range(64)
    ]
    emulators = [thread(7100 + n, "emulator", "8-15,136-143") for n in range(40)]
    big = sandbox(
        "hpc/big",
        "8-79,136-143",
        *vcpus,
        *emulators,
        exclusive="16-79",
        shared="8-15,136-143",
        containers=[container("big", "16-79", "16-79"), container("helper", "8-15,136-143")],
        guest=links(
            *((n, str(16 + n), n, "proven", b"big".hex().ljust(64, "0")) for n in range(64)),
            first=7000,
            containers=[confined("big", "0-63"), confined("helper", None, reason="no vCPU left")],
        ),
    )
    return state(
        big,
        cpus=256,
        isolated="100-127,228-255",
        nohz_full="100-127,228-255",
        present="0-271",
        kubelet=Kubelet("static", "0-7,128-135"),
    )


def hostile() -> State:
    """Return a document whose foreign texts try to be markup, escapes, lines and directions."""
    evil = "[red]x[/red]\x1b[31m\n\x00\u202e\u200b\x9b1m"
    return without_daemon(
        state(
            sandbox(
                f"ns/{evil}",
                "4-5",
                thread(1, "vcpu", "4", vcpu=0, comm=evil, reason=evil, iothread=""),
                thread(
                    2, "iothread", "5", iothread=evil, source="qmp", fallback=evil, conflict=evil
                ),
                id=evil,
                handler=evil,
                vmm_problem=evil,
                mask_origin=evil,
                vmm=vmm(exe=evil, confirmed_by=evil),
                containers=[container(evil, "4-5", "4", reason=evil, note=evil, source=evil)],
                notes=[note(evil), note(evil, warning=False)],
                guest=links(
                    (0, "4", 0, evil, evil),
                    (1, "5", None, "unknown", evil),
                    state=evil,
                    detail=evil,
                    kernel=evil,
                    kernel_source=evil,
                    containers=[confined(evil, "1", reason=evil, proof=evil, detail=evil)],
                ),
            ),
            hostname=evil,
        ),
        evil,
    )


def foreign() -> State:
    """Return pods with names that are wide, combined or not Latin."""
    return recorded("foreign.json", State)


def host_process(pid: int, comm: str, *threads: ProcessThread, **fields: Any) -> HostProcess:
    """Return a process of root that works for no sandbox."""
    given: dict[str, Any] = {"pid": pid, "comm": comm, "threads": threads}
    return part(HostProcess, **given | {"command": f"/usr/bin/{comm} --port \x1b[31m"} | fields)


def busy_cpu() -> WhoDocument:
    """Return a `who` document of an exclusive pCPU with an intruder."""
    return recorded("busy-cpu.json", WhoDocument)


def intruder(pid: int, comm: str, *, threads: int = 1, cgroup: str = "", **fields: Any) -> Intruder:
    """Return a process of a service of its own that may run on pCPU 4."""
    own = {name: fields.pop(name) for name in ("last_there", "there_s") if name in fields}
    several = (ProcessThread(pid + n, comm, "0-15", "") for n in range(threads))
    return Intruder(
        host_process(pid, comm, *several, intruder=True, **fields),
        CpuSet([4]),
        SeenTask(pid, pid, comm, 0, CpuSet(range(16)), cgroup or f"/system.slice/{comm}.service"),
        **{"last_there": 0, "there_s": 0.0, **own},
    )


def intruders(
    *every: Intruder,
    ran_ms: Mapping[int, float] = MappingProxyType({}),
    masks: Mapping[str, CpuSet] = MappingProxyType({}),
) -> tuple[IntruderGroup, ...]:
    """Return their groups on a node with cgroup v2 whose pCPUs 0-3 are nobody's alone."""
    return grouped(every, remedies.NodeConditions(CpuSet(range(4)), cgroup_v2=True), ran_ms, masks)


def busy_cpus() -> WhoDocument:
    """Return a `who` document of several pCPUs: exclusive, shared, free, offline."""
    return recorded("busy-cpus.json", WhoDocument)


def grant(pod: str, name: str, **fields: Any) -> Grant:
    """Return a grant of the allocator, of class none unless told."""
    known = {"id": f"{pod}/{name}".encode().hex().ljust(64, "0"), "pod_uid": f"uid-{pod}"}
    return part(Grant, **known | {"name": name, "pod": pod} | fields)


def push(channel: str, reason: str = "", **fields: Any) -> Push:
    """Return how cpusets are sent between two calls of the runtime."""
    return part(Push, channel=channel, reason=reason, **fields)


def allotted(**fields: Any) -> State:
    """Return a state whose node has an allocator at work; `fields` override its own."""
    document = recorded("allotted.json", State)
    assert document.allocation is not None
    return replace(document, allocation=replace(document.allocation, **fields))


def not_checked() -> CheckDocument:
    """Return a `check` document of a daemon that does not answer."""
    return could_not_tell("no daemon")


def examined() -> DoctorDocument:
    """Return a `doctor` document with each status."""
    return recorded("examined.json", DoctorDocument)


def done() -> Applied:
    """Return a `pin` document in which one thread was refused."""
    return recorded("done.json", Applied)


def bound(*, dry_run: bool = False) -> BindDocument:
    """Return a `bind` document: one sandbox that is bound, and one that no longer is."""
    return replace(recorded("bound.json", BindDocument), dry_run=dry_run)


def explained() -> Explanation:
    """Return an `explain` document."""
    return recorded("explained.json", Explanation)


def changed() -> HistoryDocument:
    """Return a `history` document."""
    return recorded("changed.json", HistoryDocument)


def top(**fields: Any) -> TopDocument:
    """Return a sample: a vCPU that waits, an intruder, and what a node cannot tell."""
    return replace(recorded("top.json", TopDocument), **fields)


def remembered(**fields: Any) -> MemoryDocument:
    """Return the memory of a sandbox at home, one far away, and two of which little is known."""
    return replace(recorded("remembered.json", MemoryDocument), **fields)
