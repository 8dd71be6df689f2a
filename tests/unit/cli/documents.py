"""State documents made by hand: data for the renderers, in the shape of docs/json.md."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kata_pin.cli.reports import words
from kata_pin.cli.reports.intruders import Intruder, grouped
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.windows import SeenTask
from kata_pin.model.reports import Note
from kata_pin.model.reports.applied import Applied, AppliedSandbox, Result
from kata_pin.model.reports.check import IntruderGroup
from kata_pin.model.reports.daemon import Daemon, Metrics, Nri
from kata_pin.model.reports.doctor import DoctorDocument, Row
from kata_pin.model.reports.explain import Explanation
from kata_pin.model.reports.guest import Guest, GuestContainer, GuestLink, GuestLinks, GuestVcpu
from kata_pin.model.reports.history import Change, HistoryDocument, NodeEvent
from kata_pin.model.reports.memory import MemoryDocument, NodeMemory, SandboxMemory
from kata_pin.model.reports.network import Interface, Network, VhostWorker
from kata_pin.model.reports.pools import Allocation, Grant, Holder, Pools, Push, RefusedRequest
from kata_pin.model.reports.quiet import (
    KeptQuiet,
    Quiet,
    QuietCpu,
    QuietInterrupt,
    QuietSandbox,
    QuietSibling,
    QuietSpared,
)
from kata_pin.model.reports.sandbox import (
    Container,
    CpusetReport,
    Memory,
    Sandbox,
    Thread,
    Vmm,
    Writer,
)
from kata_pin.model.reports.state import CpuPlace, Kubelet, Node, State
from kata_pin.model.reports.top import (
    Interrupts,
    Missing,
    TopDocument,
    TopPcpu,
    TopRole,
    TopSandbox,
    TopThread,
)
from kata_pin.model.reports.who import (
    CpuClaim,
    HostProcess,
    KernelThread,
    KernelThreads,
    Place,
    ProcessThread,
    WhoDocument,
    WhoPcpu,
)
from kata_pin.policy.isolation import remedies


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


NRI = Nri("/var/run/nri/nri.sock", "containerd v2.1.4", 93700.0, "")
METRICS = Metrics("unix:/run/kata-pin/metrics.sock", "")
RUNNING = Daemon(running=True, pid=812, version="0.1.0", uptime_s=93784.0, nri=NRI, metrics=METRICS)


def state(*sandboxes: Sandbox, cpus: int = 16, **node: Any) -> State:
    """Return a document; `node` overrides facts of the node."""
    facts: dict[str, Any] = {
        "hostname": "worker-7",
        "kernel": "6.12.48",
        "online": f"0-{cpus - 1}",
        "present": f"0-{cpus - 1}",
        "isolated": "",
        "nohz_full": "",
        "cpus": places(cpus, nodes=2 if cpus > 4 else 1, smt=cpus > 4),
        "kubelet": Kubelet("static", "0-3,8-11"),
        "thread_events": True,
        "mode": "act",
    } | node
    return State(
        time="2026-11-20T21:00:00Z",
        daemon=RUNNING,
        node=Node(**facts),
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
    return Note("test", text, "warning" if warning else "info")


TAP = Interface("tap0_kata", "tap", 2, "eth0", True, (VhostWorker(4105, True),))


def networked(*, problem: str = "") -> State:
    """Return a state of one sandbox with its network, or with the reason why it is unknown."""
    interfaces = (TAP, Interface("eth0", "veth", 1, "tap0_kata"), Interface("x\x1b[31m", "", 1))
    network = Network(() if problem else interfaces, problem)
    return state(replace(database(), network=network))


def vmm(**fields: Any) -> Vmm:
    """Return a QEMU."""
    facts: dict[str, Any] = {
        "kind": "qemu",
        "pid": 4100,
        "starttime": 99,
        "exe": "/opt/kata/bin/qemu-system-x86_64",
        "exe_replaced": False,
        "confirmed_by": "cgroup",
        "kvm": True,
        "boot_vcpus": 1,
        "max_vcpus": 16,
        "orphan": False,
        "guest_cid": 1234,
    }
    return Vmm(**(facts | fields))


def container(name: str, cpus: str | None, exclusive: str = "", **fields: Any) -> Container:
    """Return a running container."""
    facts: dict[str, Any] = {
        "id": name.encode().hex().ljust(64, "0")[:64],
        "name": name,
        "kind": "container",
        "state": "running",
        "cpus": cpus,
        "mems": "",
        "exclusive": exclusive,
        "provenance": "kubelet" if exclusive else "none",
        "reason": "assigned by the static policy" if exclusive else "",
        "cpusets": (CpusetReport("bundle", cpus, 75.0, used=True),),
        "cpusets_reason": "config.json is the only source",
        "source": "hook:createRuntime",
        "recorded_s": 75.0,
        "quota_us": None,
        "period_us": None,
        "shares": None,
        "bundle": "",
        "note": "",
    }
    return Container(**(facts | fields))


def thread(tid: int, role: str, cpus: str, **fields: Any) -> Thread:
    """Return a thread that is where it should be."""
    index = fields.get("vcpu")
    facts: dict[str, Any] = {
        "tid": tid,
        "tgid": 4100,
        "starttime": 100,
        "comm": "qemu-system-x86",
        "role": role,
        "label": f"vcpu {'?' if index is None else index}" if role == "vcpu" else role,
        "source": "debugfs" if role == "vcpu" else "rest",
        "vcpu": None,
        "apic_id": index,
        "iothread": "",
        "conflict": "",
        "desired": cpus,
        "expected": cpus,
        "fallback": "",
        "reason": "paired with db" if role == "vcpu" else "overhead: auto, shared CPUs",
        "paired": role == "vcpu",
        "container": "",
        "affinity": cpus,
        "last_cpu": int(cpus.replace(",", "-").split("-")[0]),
        "cpu_ticks": 1234,
        "cgroup": "/kata_overhead/x",
        "cpuset": "0-15",
        "state": "ok",
        "run_delay_s": 0.3,
        "preemptions": 12,
        "migrations": 1,
    }
    return Thread(**(facts | fields))


def sandbox(pod: str, mask: str | None, *threads: Thread, **fields: Any) -> Sandbox:
    """Return a sandbox whose threads are where they should be."""
    facts: dict[str, Any] = {
        "id": pod.encode().hex().ljust(64, "0")[:64],
        "pod": pod,
        "handler": "kata",
        "state": "ok",
        "mask": mask,
        "mask_origin": "union of 1 container",
        "exclusive": "",
        "shared": mask or "",
        "checked_s": 1.2,
        "duration_ms": 0.84,
        "containers": (),
        "vmm": vmm(),
        "vmm_problem": "",
        "guest": None,
        "threads": threads,
        "writers": (),
        "notes": (),
    }
    return Sandbox(**(facts | fields))


def links(
    *numbers: tuple[int, str, int | None, str, str], first: int = 4101, **fields: Any
) -> Guest:
    """Return a guest's map: (vCPU, pCPUs, guest CPU, state, owner's id) each."""
    measured = GuestLink("measured", "debugfs"), GuestLink("measured", "KVM's vCPU id")
    vcpus = [
        GuestVcpu(
            tid=first + n,
            vcpu=index,
            apic_id=index,
            guest_cpu=number,
            state=known,
            source=f"what is {known}",
            links=GuestLinks(*measured, GuestLink(known, f"what is {known}")),
            cpus=cpus,
            paired=bool(owner),
            container=owner,
        )
        for n, (index, cpus, number, known, owner) in enumerate(numbers)
    ]
    facts: dict[str, Any] = {
        "state": "applied",
        "detail": "",
        "answered_s": 3.4,
        "kernel": "6.12.47",
        "kernel_source": "/opt/kata/share/kata-containers/vmlinux.container",
        "hotplugged": False,
        "vcpus": tuple(vcpus),
        "containers": (),
    }
    return Guest(**(facts | fields))


def confined(name: str, cpus: str | None, **fields: Any) -> GuestContainer:
    """Return the guest CPUs of a container, which its guest was told and read back."""
    facts: dict[str, Any] = {
        "id": name.encode().hex().ljust(64, "0")[:64],
        "name": name,
        "cpus": cpus,
        "owned": cpus is not None,
        "reason": "guest CPUs of its own vCPUs",
        "applied": cpus,
        "proof": None if cpus is None else "read",
        "detail": "",
    }
    return GuestContainer(**(facts | fields))


def disturbed() -> State:
    """Return a state with what disturbs its exclusive pCPUs."""

    def cpu(number: int, *interrupts: QuietInterrupt, **fields: Any) -> QuietCpu:
        facts: dict[str, Any] = {
            "cpu": number,
            "owner": "default/db-0",
            "container": "db",
            "interrupts": interrupts,
            "tick_per_s": 250.0,
            "ipi_per_s": 3.5,
            "softirqs": {"TIMER": 250.0, "RCU": 12.0},
            "kernel_threads": 37,
            "nohz_full": False,
            "idle_limit": "0",
            "governor": "powersave",
            "frequency_with": str(number),
            "siblings": (QuietSibling(number ^ 1, "default/db-0"),),
        }
        return QuietCpu(**(facts | fields))

    rows = (
        Row(
            "interrupts",
            "warn",
            "2 interrupts that can be moved are on exclusive pCPUs; active now: eth0-rx-1 "
            "(interrupt 36) 302/s on pCPU 4",
            "quiet: irq in the configuration, or for i in 36 37; do echo 0-3,6-15 > "
            "/proc/irq/$i/smp_affinity_list; done",
        ),
        Row("irqbalance", "ok", "not running: interrupts stay where they are put"),
        Row("watchdog", "warn", "not readable: /proc/sys/kernel/watchdog: Permission denied"),
        Row("CPU quota", "ok", "none", sandbox="default/db-0"),
        Row("SMT siblings", "warn", "shares cores: pCPU 4 with 5 (a\x1b[31m)", "", "default/db-0"),
    )
    found = Quiet(
        1.0,
        (
            cpu(
                4,
                QuietInterrupt(36, "eth0-rx-1", "movable", "0-15", 302.0),
                QuietInterrupt(41, "nvme0q5 \x1b[31m", "managed", "4", 8.0),
                QuietInterrupt(37, "eth0-tx-1", "movable", "0-15", 0.0),
            ),
            cpu(5, idle_limit="20", softirqs=None, tick_per_s=None, ipi_per_s=None,
                kernel_threads=None, governor=None, siblings=(QuietSibling(4, ""),)),
        ),
        rows,
        ("cannot read /proc/softirqs: Permission denied",),
    )  # fmt: skip
    return replace(state(database()), quiet=found)


def kept() -> State:
    """Return a state with a sandbox whose pCPUs are kept quiet, but for one."""
    found = QuietSandbox(
        level="full", cpus="5", not_quiet="4", idle_limit="n/a", governor="performance\x1b[31m",
        managed=33, problems=("pCPU 4 is not quiet: NUMA node 0 has interrupts",),
    )  # fmt: skip
    sandbox = replace(database(), quiet=found, notes=(note(found.problems[0]),))
    return replace(
        state(sandbox),
        kept_quiet=KeptQuiet(
            level="full", cpus="5", full="5", crio="", spared=(QuietSpared(4, "why"),),
            changed={"interrupt": 12}, failed_writes={}, managed=33, movable_fired=0,
            managed_fired=7, irqbalance=(812,), left=(), problems=(),
        ),
    )  # fmt: skip


def database() -> Sandbox:
    """Return a sandbox with exclusive pCPUs, shared ones, and everything in place."""
    return sandbox(
        "default/db-0",
        "4-7",
        thread(4100, "emulator", "6-7"),
        thread(4101, "vcpu", "6-7", vcpu=0, paired=False,
               reason="unpaired vCPU: shared CPUs (overhead: auto)"),
        thread(
            4102, "vcpu", "4", vcpu=1,
            run_delay_s=0.25, preemptions=12345, migrations=1, unmoved_s=41.0,
        ),
        thread(4103, "vcpu", "5", vcpu=2),
        thread(4104, "iothread", "6-7", iothread="iothread-0123456789abcdef", source="qmp",
               last_cpu=0),
        thread(4105, "vhost", "6-7", source="flags", comm="vhost-4100"),
        thread(4090, "virtiofsd", "6-7", tgid=4090, source="process", comm="virtiofsd"),
        thread(4001, "shim", "0-15", tgid=4001, state="unmanaged", expected=None, desired=None,
               source="process", reason="not pinned by kata-pin", comm="containerd-shim",
               run_delay_s=None, preemptions=None, migrations=None),
        exclusive="4-5",
        shared="6-7",
        mask_origin="union of 2 containers",
        containers=[
            container("pause", None, kind="sandbox", recorded_s=80.0),
            container("db", "4-5", "4-5"),
            container("sidecar", "6-7"),
        ],
        notes=[note("vCPU 0 runs on shared CPUs", warning=False)],
        guest=links(
            (0, "6-7", 0, "proven", ""), (1, "4", 1, "proven", b"db".hex().ljust(64, "0")),
            (2, "5", 2, "measured", b"db".hex().ljust(64, "0")),
            containers=[
                confined("db", "1-2"),
                confined("sidecar", "0", owned=False, proof="none",
                         reason="guest CPUs of vCPUs that are no container's own"),
            ],
        ),
    )  # fmt: skip


def writer(name: str, **fields: Any) -> Writer:
    """Return another writer."""
    facts: dict[str, Any] = {
        "name": name,
        "active": False,
        "evidence": "",
        "count": 0,
        "since_s": None,
        "tids": (),
    }
    return Writer(**(facts | fields))


def drifted() -> Sandbox:
    """Return a sandbox with two threads off their CPUs."""
    return sandbox(
        "trading/feed-handler-7f9c6d5b8-x2x4q",
        "12-15",
        thread(5101, "vcpu", "12", vcpu=0),
        thread(5102, "vcpu", "0-15", vcpu=1, expected="13", desired="13", state="drift",
               last_cpu=3),
        thread(5103, "emulator", "0-15", expected="12-13", desired="14-15", state="drift",
               fallback="cgroup /kata_x allows 12-13"),
        state="drift",
        exclusive="12-15",
        shared="",
        containers=[container("feed", "12-15", "12-15")],
        writers=[
            writer("kata", evidence="enable_vcpus_pinning in persist.json"),
            writer("other", active=True, count=4, since_s=185.0, tids=[5101, 5102]),
        ],
        notes=[note("the VM has 2 vCPUs for 4 exclusive CPUs: raise default_vcpus to 5")],
        guest=links(
            (0, "12", 0, "proven", b"feed".hex().ljust(64, "0")),
            (15, "13", None, "unknown", b"feed".hex().ljust(64, "0")),
            (14, "14-15", 3, "inferred", ""),
            first=5101, state="failed",
            detail="1 of 2 containers is not on its assigned guest CPUs",
            hotplugged=True,
            kernel="", kernel_source="-kernel: changed since the VMM's start", answered_s=None,
            containers=[
                confined("feed", None, applied="0-3", proof="broken", detail="runs on 0-15",
                         reason="1 of its own vCPUs has no guest CPU that may be acted on"),
            ],
        ),
    )  # fmt: skip


def lost() -> Sandbox:
    """Return a sandbox whose VMM was not found, without a known pod."""
    name = "f00d" * 16
    return sandbox(
        name,
        None,
        id=name,
        state="no-vmm",
        vmm=None,
        vmm_problem="pid 77: exe /tmp/qemu is not on the allow-list",
        mask_origin="",
        checked_s=None,
        duration_ms=None,
        containers=[container("app", "3", state="created")],
    )


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
    return state(
        sandbox("生产环境/数据库-0", "4-5", thread(1, "vcpu", "4", vcpu=0)),
        sandbox("café/nai\u0308ve-🚀", "6,8,10,12,14", thread(2, "vcpu", "6,8,10,12,14", vcpu=0)),
        sandbox("прод/очень-длинное-имя-пода-которое-не-помещается", "7"),
    )


def host_process(pid: int, comm: str, *threads: ProcessThread, **fields: Any) -> HostProcess:
    """Return a process of root that works for no sandbox."""
    facts: dict[str, Any] = {
        "user": "root",
        "command": f"/usr/bin/{comm} --port \x1b[31m",
        "age_s": 260000.0,
        "cpu_s": 71.64,
        "sandbox": "",
        "pod": "",
        "intruder": False,
    }
    return HostProcess(pid=pid, comm=comm, threads=threads, **(facts | fields))


BUSY = WhoPcpu(
    cpu=4,
    online=True,
    place=Place(4, 0, 0, 0, 4, 0, "", "4,12", ("isolated",)),
    claims=(CpuClaim("ab", "default/db-0", "exclusive", "db"),),
    busy_percent=37.4,
)


def busy_cpu() -> WhoDocument:
    """Return a `who` document of an exclusive pCPU with an intruder."""
    bound = ["cpuhp", "migration", "ksoftirqd", "kworker", "idle_inject", "irq_work", "rcuc"]
    worker = tuple(ProcessThread(990 + n, "worker", "0-15", "") for n in range(12))
    vcpu = ProcessThread(4102, "qemu-system-x86", "4", "vcpu 1")
    return WhoDocument(
        time="2026-11-20T21:00:00Z",
        daemon=replace(RUNNING, uptime_s=5.0),
        cpus="4",
        pcpus=(BUSY,),
        processes=(
            host_process(990, "node-exporter", *worker, user="nobody", intruder=True),
            host_process(
                *(4100, "qemu-system-x86", vcpu),
                command="/opt/kata/bin/qemu-system-x86_64 -name sandbox-default/db-0 -uuid 6a",
                sandbox="ab",
                pod="default/db-0",
            ),
        ),
        kernel=KernelThreads(
            tuple(KernelThread(n, f"{name}/4") for n, name in enumerate(bound)),
            (KernelThread(2, "kthreadd"),),
        ),
    )


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
    *every: Intruder, ran_ms: Mapping[int, float] = MappingProxyType({})
) -> tuple[IntruderGroup, ...]:
    """Return their groups on a node with cgroup v2 whose pCPUs 0-3 are nobody's alone."""
    return grouped(every, remedies.Node(CpuSet(range(4)), cgroup_v2=True), ran_ms)


def busy_cpus() -> WhoDocument:
    """Return a `who` document of several pCPUs: exclusive, shared, free, offline."""
    shared = WhoPcpu(
        cpu=6, online=True, place=Place(6, 0, 0, 0, 6, 0, "", "6,14", ()), busy_percent=0.0,
        claims=(CpuClaim("ab", "default/db-0", "shared", ""), CpuClaim("cd", "a/b", "shared", "")),
    )  # fmt: skip
    free = WhoPcpu(7, online=True, place=Place(7, 0, 0, 0, 7, 0, "E", "7,15", ("E",)), claims=())
    offline = WhoPcpu(17, online=False, place=None, claims=())
    return replace(busy_cpu(), cpus="4,6-7,17", pcpus=(BUSY, shared, free, offline))


def grant(pod: str, name: str, **fields: Any) -> Grant:
    """Return a grant of the allocator, of class none unless told."""
    known: dict[str, Any] = {
        "id": f"{pod}/{name}".encode().hex().ljust(64, "0"),
        "kind": "container",
        "name": name,
        "pod": pod,
        "pod_uid": f"uid-{pod}",
        "sandbox": "",
        "kata": False,
        "cpu_class": "none",
        "policy": "annotation",
        "cpus": "0-1,8-9",
        "exclusive": "",
        "shared": "0-1,8-9",
        "mems": "",
        "millis": 500,
        "ended": False,
        "override": None,
        "cpuset": "0-1,8-9",
        "pending": None,
        "adjustment": None,
        "reasons": ["its pod has no annotation"],
    }
    return Grant(**(known | fields))


def push(channel: str, reason: str = "", **fields: Any) -> Push:
    """Return how cpusets are sent between two calls of the runtime."""
    known = {"channel": channel, "reason": reason, "problem": "", "failures": []}
    return Push(**(known | fields))


def allotted(**fields: Any) -> State:
    """Return a state whose node has an allocator at work; `fields` override its own."""
    own: dict[str, Any] = {"cpu_class": "exclusive", "shared": None, "kata": True, "millis": 4000}
    why = ["annotation cpu-policy.kata-pin.io says exclusive", "its CPU limit equals its request"]
    vm = "VM of 5 vCPUs for 4 exclusive CPUs: 1 surplus vCPUs and the overhead threads run on 3"
    grants = [
        grant("shop/web", "app"),
        grant("default/db-0", "postgres", **own, cpus="4-5,12-13", exclusive="4-5,12-13",
              sandbox="ab" * 32, cpuset="3-5,12-13", reasons=why),
        grant("default/db-0", "", kind="sandbox", id="vm:" + "ab" * 32, kata=True,
              cpuset="", cpus="3", shared="3", reasons=[vm]),
        grant("media/\x1b[31mencoder", "x264", **own, cpus="6-7", exclusive="6-7",
              override="exclusive", pending="2,6-7", cpuset="6-7",
              reasons=["administrator's override: exclusive"]),
        grant("shop/cache", "redis", cpu_class="share", shared="1,9", cpus="1,9", pending="1,9"),
    ]  # fmt: skip
    allocation: dict[str, Any] = {
        "policy": "annotation",
        "suspended": "",
        "guarantee": "every container of the node",
        "held_back": "",
        "pools": Pools(reserved="0", housekeeping="3", shared="0-1,8-9",
                       exclusive="4-7,12-13", taken="2,10"),
        "grants": grants,
        "holders": [Holder("ef" * 32, "media/\x1b[31mplayer", "mixer", "2,10", "plugin",
                           "another NRI plugin gave it cpuset 2,10")],
        "push": push("cri", "containerd before 2.4.0 can deadlock on updates unasked"),
        "refusals": 1,
        "refused": [RefusedRequest(
            time="2026-11-20T20:58:00Z", id="cd" * 32, container="shop/late app",
            kind="not-enough-cpus", message="not enough CPUs: 8 asked for, 2 free", strict=False)],
        "problems": ["/etc/kata-pin/policies: line 3: expected one of none, share, exclusive"],
        "notes": [note("annotation cpu-policy.kata-pin.io of pod shop/typo: 'shared' is not none, "
                       "share or exclusive: treated as none")],
    } | fields  # fmt: skip
    return replace(state(kubelet=None), allocation=Allocation(**allocation))


def examined() -> DoctorDocument:
    """Return a `doctor` document with each status."""
    rows = [
        Row("daemon", "ok", "running, version 0.1.0, pid 812"),
        Row(
            "capabilities", "fail", "CAP_SYS_NICE is missing: no affinity can be set", "run as root"
        ),
        Row("debugfs", "warn", "/sys/kernel/debug/kvm does not exist", "mount -t debugfs none"),
        Row("programs", "ok", "containerd (pid 702, started 3 d ago)"),
        Row("isolation", "info", "no isolated CPUs"),
        Row("network", "ok", words.interface(TAP), "", "default/db-0"),
        Row("overhead", "ok", "usable modes: auto (shared CPUs), sandbox", "", "default/db-0"),
    ]
    return DoctorDocument(ok=False, rows=tuple(rows))


def done() -> Applied:
    """Return a `pin` document in which one thread was refused."""
    result = Result(5102, "0-15", "13", "13", "done", "paired with feed")
    refused = replace(result, tid=5103, target="14-15", after=None, outcome="refused")
    one = AppliedSandbox(
        id="ab" * 32,
        pod="trading/feed",
        state="drift",
        vmm_problem="",
        threads=3,
        duration_ms=0.9,
        results=(result, refused),
        notes=(note("cgroup /kata_x allows 12-13 only"),),
    )
    other = replace(
        one, pod="ab" * 32, state="no-vmm", vmm_problem="exe not allowed",
        threads=0, results=(), notes=(),
    )  # fmt: skip
    return Applied(kind="pin", sandboxes=(one, other))


def explained() -> Explanation:
    """Return an `explain` document."""
    remedies = (
        "remedies: raise default_vcpus to 5 in Kata's configuration, or give the container a CPU "
        "limit so that Kata adds vCPUs"
    )
    lines = (
        "sandbox abab (trading/feed)",
        "containers",
        "  feed (container, running): cpuset 12-15, recorded from hook:createRuntime",
        "VM size",
        f"  the VM has 2 vCPUs for 4 exclusive CPUs; {remedies}",
        "threads",
        "  vcpu 1 (tid 5102, debugfs): affinity 0-15, expected 13: paired with feed",
    )
    return Explanation(sandbox="abab", lines=lines)


def changed() -> HistoryDocument:
    """Return a `history` document."""
    first = Change(
        time="2026-11-20T20:59:58.120Z",
        age_s=1.88,
        sandbox="abab",
        pod="trading/feed",
        state="ok",
        previous_state="",
        mask="12-15",
        previous_mask=None,
        threads=21,
        moved=21,
        triggers=("hook:createRuntime",),
        latency_ms=4.6,
    )
    later = replace(
        first, time="2026-11-20T20:59:59.000Z", age_s=1.0, previous_state="ok",
        previous_mask="12-15",
    )  # fmt: skip
    wider = replace(later, mask="4-5,12-15", triggers=("nri:PostUpdateContainer",))
    ended = replace(
        later, state="gone", previous_mask="4-5,12-15", mask=None, threads=0, moved=0,
        triggers=("VMM exited",), latency_ms=61_000.0,
    )  # fmt: skip
    changes = (first, replace(later, moved=1, triggers=("thread born", "audit")), wider, ended)
    events = (
        NodeEvent(
            "2026-11-20T20:59:58.500Z",
            1.5,
            "reload-refused",
            "configuration not reloaded: /etc/kata-pin/config.yaml: mode: expected one of act, "
            "observe: 'acct'",
        ),
        NodeEvent("2026-11-20T20:59:59.500Z", 0.5, "alloc-decides", "allocator: deciding again"),
    )
    return HistoryDocument(time="2026-11-20T21:00:00Z", changes=changes, events=events)


def top_thread(label: str, cpus: str, **fields: Any) -> TopThread:
    """Return a thread that is at ease."""
    facts: dict[str, Any] = {
        "tid": 4100,
        "comm": "qemu-system-x86",
        "label": label,
        "cpus": cpus,
        "state": "ok",
        "cpu_percent": 12.25,
        "wait_percent": 0.0,
        "starving": False,
        "preemptions": 1.5,
        "migrations": 0.0,
        "last_cpu": 4,
    }
    return TopThread(**(facts | fields))


def top(**fields: Any) -> TopDocument:
    """Return a sample: a vCPU that waits, an intruder, and what a node cannot tell."""
    worker = top_thread("vhost", "6-7", comm="vhost-4100", tid=4105, cpu_percent=3.0)
    web = TopSandbox(
        id="ab" * 32,
        pod="shop/web",
        state="ok",
        mask="4-7",
        cpu_percent=126.0,
        wait_percent=77.4,
        throttled_percent=0.0,
        vcpus=(
            top_thread("vcpu 0", "4", cpu_percent=22.6, wait_percent=77.4, preemptions=1234.5),
            top_thread("vcpu 1", "5", cpu_percent=99.8, last_cpu=5),
        ),
        overhead=(
            TopRole("emulator", 1, "6-7", 0, 0.4, 0.0, ()),
            TopRole("vhost", 2, "6-7", 0, 3.2, 0.1, (worker, worker)),
        ),
    )
    db = replace(web, id="cd" * 32, pod="shop/db", state="drift", mask=None, wait_percent=0.04,
                 vcpus=(top_thread("vcpu 0", "0-15", state="drift", wait_percent=0.04),),
                 overhead=())  # fmt: skip
    late = replace(
        web, id="ef" * 32, pod="other/late", mask="12", cpu_percent=None, wait_percent=None,
        vcpus=(
            top_thread("vcpu 0", "12", cpu_percent=None, wait_percent=None, preemptions=None,
                       migrations=None, last_cpu=None),
        ),
        overhead=(),
    )  # fmt: skip
    counts = Interrupts(tick=250.0, reschedule=12.5, call=3.0, device=0.0, guest=1.0, other=0.5)
    pcpu = TopPcpu(
        cpu=4, sandbox=web.id, pod=web.pod, online=True, conflict=False, own_percent=22.6,
        foreign_percent=76.4, foreign_switches=None, throttled_percent=0.0, steal_percent=0.0,
        interrupts=counts, softirqs={"TIMER": 250.0, "RCU": 31.0},
    )  # fmt: skip
    facts: dict[str, Any] = {
        "time": "2026-11-20T21:00:00Z",
        "daemon": RUNNING,
        "hostname": "worker-7",
        "seconds": 2.001,
        "threads": 9,
        "sandboxes": (web, db, late),
        "pcpus": (
            pcpu,
            replace(pcpu, cpu=5, own_percent=99.8, foreign_percent=0.0, conflict=True),
            replace(pcpu, cpu=12, sandbox=late.id, pod=late.pod, online=False, own_percent=None,
                    foreign_percent=None, steal_percent=None, interrupts=None, softirqs=None),
        ),
        "missing": (
            Missing("foreign_switches", "this kernel has no /proc/schedstat (CONFIG_SCHEDSTATS)"),
        ),
        "notes": (note("3 threads may not be read; run as root"),),
    }  # fmt: skip
    return TopDocument(**(facts | fields))


def remembered(**fields: Any) -> MemoryDocument:
    """Return the memory of a sandbox at home, one far away, and two of which little is known."""
    gib = 1 << 30
    home = SandboxMemory(
        id="ab" * 32, pod="shop/web", pid=4100, vcpu_nodes="0", source="cgroup",
        cgroup="/sys/fs/cgroup/kubepods/p1", nodes=(NodeMemory(0, 4 * gib, 2 * gib),),
        total_bytes=4 * gib, remote_bytes=0, remote_percent=0.0, problem="",
    )  # fmt: skip
    far = replace(home, id="cd" * 32, pod="trading/feed-handler-7f9c6d5b8-x2x4q", pid=5100,
                  vcpu_nodes="1", nodes=(NodeMemory(0, 3 * gib, 0), NodeMemory(1, gib, 0)),
                  remote_bytes=3 * gib, remote_percent=75.0)  # fmt: skip
    unread = replace(
        home,
        id="ef" * 32,
        pod="shop/db",
        source="none",
        nodes=(),
        total_bytes=None,
        remote_bytes=None,
        remote_percent=None,
        problem="cannot read numa_maps of process 4100: Permission denied",
    )
    moving = replace(
        far,
        id="0a" * 32,
        pod="trading/book",
        move=Memory("moving", "1", 3 * gib, gib // 2, ""),
    )
    facts: dict[str, Any] = {
        "time": "2026-11-20T21:00:00Z",
        "daemon": RUNNING,
        "node_count": 2,
        "sandboxes": (home, far, moving, unread),
    }  # fmt: skip
    return MemoryDocument(**(facts | fields))
