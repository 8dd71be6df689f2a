"""Inputs to begin from, by parser: recordings of tests/data, and small documents of each form.

What real recordings lack (a denied request, an old version's form, numbers that are absurd) is
written out here. A mutator damages them; it seldom finds a whole form by itself.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

from google.protobuf.message import Message

from kata_pin.base.allocation import AllocState, ContainerRequest, Grant, PodRequest
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.answers import Names, SandboxName
from kata_pin.options.allocation.requests import dump_state
from kata_pin.peers import ttrpc
from kata_pin.peers.proto import agent_pb2, kubelet_pb2, nri_pb2, ttrpc_pb2
from kata_pin.service.protocol import encode
from tests.support import recordings
from tests.support.recordings import DATA, files

MARKS = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.sandbox-id": "p1",
    "io.kubernetes.cri.sandbox-name": "web",
    "io.kubernetes.cri-o.ContainerID": "c1",
    "io.katacontainers.pkg.oci.container_type": "pod_container",
}
STATE = {"ociVersion": "1.1.0", "id": "c1", "status": "creating", "pid": 7, "bundle": "/run/b/c1"}
CPU = {"cpus": "0-3,8", "mems": "0", "quota": 200000, "period": 100000, "shares": 1024}

STATES = [
    json.dumps(STATE | {"annotations": MARKS}).encode(),
    b'{"id":"p1","bundle":"/run/containers/p1/userdata","pid":1,"annotations":{"a":"b"}}',
]
CONFIGS = [
    json.dumps(
        {"annotations": MARKS, "linux": {"cgroupsPath": "/k/p", "resources": {"cpu": CPU}}}
    ).encode(),
    b'{"linux":{"cgroupsPath":"a:b:c","resources":{"cpu":{"cpus":"","quota":-1}}}}',
]
HEADER = b"KP1 createRuntime 123456789 4242 %d\n"
HOOKS = [HEADER % len(one) + one for one in STATES] + [b"KP1 poststop 1 2 3\nabc"]
ANSWERS = [b"recorded\npinned\n", b"recorded\nunpinned no VMM found\n", b"refused bad id\n"]

STAT = b"4242 (qemu (x) S) S 7 1 1 0 -1 4194560 9" + b" 0" * 12 + b" 5678" + b" 1" * 30 + b"\n"
SYSCALLS = [b"16 0x21 0xae80 0x0\n", b"running\n", b"-1 0x7ffc 0x7f00\n"]
CGROUPS = [b"0::/kubepods/pod1/kata_p1\n9:cpuset:/a:b/cri-containerd-p1.scope (deleted)\n"]
STATUSES = [
    b"Name:\tqemu\\nx\nUid:\t0\t0\t0\t0\nNSpid:\t7\t1\nCpus_allowed_list:\t0-3,8\nTgid:\t7\n"
]
CPUINFO = b"".join(
    b"processor\t: %d\nmodel name\t: x\napicid\t\t: %d\n\n" % (n, 2 * n) for n in (0, 1, 3)
)
METRICS = b"".join(
    b'kata_guest_cpu_time{cpu="%d",item="%s"} %d.5e+03\n' % (n, item, n)
    for n in (0, 1)
    for item in (b"user", b"idle", b"steal")
)
BZIMAGE = bytes(0x202) + b"HdrS" + bytes(8) + b"\x10\x00" + bytes(0x200) + b"6.12.47-kata x\0"
TOML = (
    b'[hypervisor.qemu]\npath="/q"\nvalid_hypervisor_paths=["/a","/b"]\ndefault_vcpus=1.5\n'
    b"default_maxvcpus=0\nenable_debug=true\n[hypervisor.clh]\npath='/c'\n[runtime]\n"
    b'sandbox_cgroup_only=true\nhypervisor_name="qemu"\nenable_vcpus_pinning=true\n'
)
CONTAINERD_TOML = (
    b'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n[plugins]\n'
    b'[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kata]\n'
    b'runtime_type = "io.containerd.kata.v2"\nbase_runtime_spec = "/x.json"\n'
    b'[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kata.options]\nConfigPath = "/y"\n'
)
BASE_SPEC = (
    b'{"ociVersion": "1.2.0", "process": {"rlimits": [{"type": "RLIMIT_NOFILE"}]}, "linux": {},'
    b' "hooks": {"poststop": [{"path": "/hook"}, {"path": "/other"}], "prestart": null}}'
)
API_NODE = (
    b'{"spec": {"taints": [{"key": "ours", "effect": "NoSchedule"}, {"key": "x"}]},'
    b' "metadata": {"managedFields": [{"manager": "nfd", "fieldsV1": {"f:zones": {}}}]}}'
)
KUBELET_PODS = kubelet_pb2.ListPodsResponse(
    pods=[
        kubelet_pb2.Pod(
            metadata=kubelet_pb2.ObjectMeta(uid="u1", annotations={"a": "b"}),
            spec=kubelet_pb2.PodSpec(init_containers=[kubelet_pb2.Container(name="i")]),
        ).SerializeToString()
    ]
).SerializeToString()
POD_RESOURCES = kubelet_pb2.ListPodResourcesResponse(
    pod_resources=[
        kubelet_pb2.PodResources(
            name="p",
            namespace="n",
            containers=[kubelet_pb2.ContainerResources(name="c", cpu_ids=[1, 2])],
        )
    ]
).SerializeToString()
YAML = (
    b"version: 1\nlog_level: debug\noverhead: reserve:1\npairing: pair\naudit:\n  deep_s: 60\n"
    b"paths:\n  bundle_roots:\n    - /run/a\n    - /run/b\nhypervisors: [/opt/q, '/opt/q-*']\n"
    b"alloc:\n  policy: topology\n  reserved: 0,128\n  options: {full-pcpus-only: 'true'}\n"
    b"metrics:\n  listen: 127.0.0.1:9000\n"
)
ORDERS = [b"# pod class\nshop/database exclusive\n0c7a4d2be81f share # x\n"]
SERVICE_TOKEN = (
    b"e30."
    + base64.urlsafe_b64encode(
        b'{"kubernetes.io":{"node":{"name":"n1","uid":"u1"},"pod":{"name":"p"}}}'
    ).rstrip(b"=")
    + b".c2ln"
)
API_STATUS = b'{"kind":"Status","status":"Failure","message":"forbidden","code":403}'
API_EVENT = b'{"kind":"Event","series":{"count":3,"lastObservedTime":"2026-01-01T00:00:00.0Z"}}'
PODS = json.dumps(
    {
        "kind": "PodList",
        "items": [{"metadata": {"uid": "u1", "annotations": {"cpu-policy.kata-pin.io": "share"}}}],
    }
).encode()
CRI_LIST = b"\x0a\x06\x0a\x02c1\x30\x01\x0a\x06\x0a\x02c2\x30\x02"
CDI = json.dumps(
    {
        "cdiVersion": "0.8.0",
        "kind": "dra.k8s.io/cpu",
        "devices": [
            {
                "name": "claim-0f8f5e2a-6b1c-4a55-9a51-0d1a6a1e7c11",
                "containerEdits": {
                    "env": ["DRA_CPUSET_0f8f5e2a-6b1c-4a55-9a51-0d1a6a1e7c11=2-3,7"]
                },
            }
        ],
    }
).encode()
REQUESTS = [
    b'{"version":1,"verb":"state","sandbox":"p1","since_s":1.5}\n',
    b'{"version":1,"verb":"policy","pods":["a/b"],"class":"exclusive"}\n',
]
REPLIES = [
    b'{"version":1,"ok":true,"document":%b}\n'
    % encode(Names(sandboxes=(SandboxName("p1", "shop/web"),))),
    b'{"version":1,"ok":false,"error":"no such sandbox","hint":"show lists them"}\n',
]
QMP_CPUS = json.dumps(
    [
        {
            "cpu-index": n,
            "thread-id": 100 + n,
            "qom-path": f"/m/{n}",
            "props": {"socket-id": n, "node-id": 0},
        }
        for n in (0, 1)
    ]
).encode()
QMP_IOTHREADS = b'[{"id":"io0","thread-id":7,"poll-max-ns":32768}]'
UEVENTS = [
    b"online@/devices/system/cpu/cpu3\0ACTION=online\0DEVPATH=/devices/system/cpu/cpu3\0",
    b"add@/devices/pci0000:00/0000:00:01.0\0ACTION=add\0",
]
ADDRESSES = [b"vsock://3:1024", b"hvsock:///run/vc/vm/p1/root/kata.hvsock:1024", b"unix:///a b"]
CPU_LISTS = [
    b"0-3,8",
    b"",
    b" 0-8191\n",
    b"0-99999999999",
    b"3-1",
    b",".join(b"%d" % n for n in range(0, 512, 2)),
]


def command_lines() -> list[bytes]:
    """Return /proc/PID/cmdline of recorded QEMUs, and of VMMs and shims that were not recorded."""
    recorded = [recordings.argv(path) for path in files("**/qemu-cmdline.txt")[:4]]
    numa = "-numa node,nodeid=0,cpus=0-3,memdev=m0 -numa node -numa cpu,node-id=1,socket-id=1"
    topology = "-smp 4,sockets=2,dies=1,cores=1,threads=2,maxcpus=8 -machine pc-q35-6.1,accel=kvm"
    backend = "-object memory-backend-ram,id=m0,host-nodes=0-1,policy=bind -object iothread,id=io0"
    device = '-device vhost-vsock-pci,guest-cid=3,id=v -device {"driver":"a","guest-cid":5}'
    others = [
        [
            "qemu-system-x86_64",
            "-name",
            "sandbox-p1,debug-threads=on",
            *f"{topology} {numa}".split(),
        ],
        ["qemu-system-x86_64", *f"{backend} {device} -kernel /k -name guest=sandbox-a,,b".split()],
        ["qemu-system-x86_64", "-smp", "4096", *["-numa", "node"] * 3, *["-numa", "cpu"] * 40],
        ["cloud-hypervisor", "--api-socket", "/run/vc/vm/p1/clh-api.sock"],
        ["firecracker", "--id", "p1", "--api-sock=/run/vc/firecracker/p1/root/fc.sock"],
        ["containerd-shim-kata-v2", "-namespace", "k8s.io", "-id", "p1", "-address", "/a"],
    ]
    return ["\0".join([*argv, ""]).encode() for argv in [*recorded, *others]]


def persisted() -> list[bytes]:
    """Return persist.json of sandboxes and of containers, and runtime-rs's state.json."""
    found = [path.read_bytes() for path in files("**/run_vc_sbs_*_persist.json")]
    state = b'{"sandbox_type":"virt","hypervisor":{"hypervisor_type":"qemu","pid":7,"id":"p1"}}'
    return [*sorted(found, key=len)[:6], state]


def checkpoints() -> list[bytes]:
    """Return cpu_manager_state files of real kubelets, and small ones with wrong checksums."""
    real = json.loads((DATA / "kubelet/kubelet_checkpoints.json").read_text())
    texts = [text for text in _texts(real) if "policyName" in text or "dataChecksum" in text]
    return [
        *(text.encode() for text in texts[:8]),
        b'{"policyName":"static","defaultCpuSet":"0","entries":{"p":{"c":"1"}},"checksum":0}',
        b'{"policyName":"static","podEntries":{"p":{"cpuSet":"1"}},"checksum":1}',
        b'{"data":"{\\"policyName\\":\\"none\\"}","dataChecksum":0}',
    ]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def kernel_texts(pattern: str) -> list[bytes]:
    """Return what kernels said of tasks, CPUs and memory, in files of these names."""
    return [path.read_bytes() for path in sorted((DATA / "kernel").glob(f"*/{pattern}"))]


@cache
def nri_trunk() -> bytes:
    """Return what a containerd sent to a plugin, from the first byte on."""
    return (DATA / "nri/from-containerd.bin").read_bytes()


def nri_frames() -> list[bytes]:
    """Return the data of every ttrpc frame of that recording."""
    trunk, inner = ttrpc.MuxDecoder(), {1: ttrpc.FrameDecoder(), 2: ttrpc.FrameDecoder()}
    return [
        frame.data
        for connection, piece in trunk.feed(nri_trunk())
        for frame in inner[connection].feed(piece)
        if frame.data is not None
    ]


def nri_payloads() -> list[bytes]:
    """Return the requests' messages of that recording, and an update with every field."""
    cpu = nri_pb2.LinuxCPU(cpus="0-3", mems="0")
    cpu.quota.value, cpu.period.value, cpu.shares.value = -1, 100000, 2
    container = nri_pb2.Container(id="c1", pod_sandbox_id="p1", name="app", pid=7)
    container.linux.resources.cpu.CopyFrom(cpu)
    pod = nri_pb2.PodSandbox(id="p1", name="web", annotations={"a": "b"}, runtime_handler="kata")
    update = nri_pb2.UpdateContainerRequest(pod=pod, container=container)
    whole = nri_pb2.SynchronizeRequest(pods=[pod] * 3, containers=[container] * 3, more=True)
    failed = nri_pb2.UpdateContainersResponse(failed=[nri_pb2.ContainerUpdate(container_id="c1")])
    found: set[bytes] = set()
    for data in nri_frames():
        found.add(ttrpc.parse_request(data).payload)
    return [*sorted(found, key=len)[:12], *map(encoded, (update, whole, failed))]


def envelopes() -> list[bytes]:
    """Return ttrpc requests and responses, of NRI and of an agent that refuses."""
    denied = ttrpc_pb2.Response()
    denied.status.code, denied.status.message = 7, "denied by policy"
    return [*nri_frames()[:6], encoded(denied), encoded(ttrpc_pb2.Response(payload=b"abc"))]


def agent_answers() -> list[bytes]:
    """Return answers of an agent, each of another kind."""
    usage = agent_pb2.StatsContainerResponse()
    usage.cgroup_stats.cpu_stats.cpu_usage.total_usage = 1 << 40
    usage.cgroup_stats.cpu_stats.cpu_usage.percpu_usage.extend([1, 2, 3])
    return [
        encoded(usage),
        encoded(agent_pb2.Metrics(metrics=METRICS.decode())),
        encoded(agent_pb2.ReadStreamResponse(data=CPUINFO)),
        encoded(agent_pb2.WaitProcessResponse(status=1)),
    ]


def allocations() -> list[bytes]:
    """Return the allocator's state with two pods."""
    request = ContainerRequest("one", PodRequest("uid", annotations={"a": "b"}), "app", 2500)
    grant = Grant(request, "topology", exclusive=CpuSet([1, 2]), reasons=("because",))
    other = Grant(ContainerRequest("two", PodRequest("u2"), quota_us=-1), "static")
    return [dump_state(AllocState(CpuSet(range(8)), grants={"one": grant, "two": other}))]


def process_events() -> list[bytes]:
    """Return messages of the process connector: a fork, an exit, an acknowledgement."""
    from kata_pin.linux.events import _EVENT
    from kata_pin.rights.broker.libc import _HEADER

    def event(what: int, *words: int) -> bytes:
        data = bytearray(_EVENT.pack(1, 1, what, *words))
        data[: _HEADER.size] = _HEADER.pack(len(data), 3, 0, 0, 0, 1, 1, 0, 8, 40, 0)
        return bytes(data)

    return [event(1, 7, 7, 9, 7), event(0x8000_0000, 9, 7, 0, 0), event(0, 0, 0, 0, 0)]


def perf_rings() -> list[bytes]:
    """Return recorded rings, each behind the positions of what is unread."""
    found = []
    for path in sorted((DATA / "perf").glob("*.ring")):
        whole = path.read_bytes()
        found.append(whole[1032:1040] + whole[1024:1032] + whole[4096:])
    return found


HIST = b"""# event histogram
{ common_cpu:          2, next_pid:         22 } hitcount:          1
{ common_cpu:          2, pid:         34 } hitcount:          4  runtime:      12979696

Totals:
    Hits: 5
    Entries: 2
    Dropped: 0
"""


def perf_samples() -> list[bytes]:
    """Return samples of tracepoints with odd numbers, which begin, and even ones, which end."""

    def sample(time_ns: int, event: int) -> bytes:
        raw = struct.pack("=HBBiiI", event, 0, 0, 7, 36, 0)
        return struct.pack("=IHHQI", 9, 1, 40, time_ns, len(raw)) + raw

    lost = struct.pack("=IHHQQ", 2, 0, 24, 1, 5)
    return [sample(1, 1) + sample(5, 3) + sample(9, 2) + lost + sample(20, 2)]


def broker_changes() -> list[bytes]:
    """Return requests to set affinities, as the daemon sends them to its broker."""
    from kata_pin.rights.broker.protocol import AffinityChange, render_changes

    one = AffinityChange(10, 11, 2**63, 7, frozenset({0, 64, 300}))
    return [render_changes([one, one._replace(cpus=frozenset())]), render_changes([one])]


def broker_requests() -> list[bytes]:
    """Return a request of each row: its number, and good arguments."""
    from kata_pin.rights.broker.rows import ROWS, Number, TextArgument

    texts = ("p1", "reader", "qmp", "exe", "?", "overlay")
    found = []
    for number, row in enumerate(ROWS):
        values: dict[str, int | str | bytes] = {}
        for one in row.arguments:
            if isinstance(one, Number):
                values[one.name] = 1
            elif isinstance(one, TextArgument):
                values[one.name] = next(t for t in texts if re.fullmatch(one.pattern, t))
            else:
                values[one.name] = broker_changes()[0]
        found.append(bytes([number]) + row.pack(values))
    return found


def broker_answers() -> list[bytes]:
    """Return the broker's answers to such requests."""
    from kata_pin.rights.broker.protocol import Changed, render_changed

    return [render_changed([Changed(0, frozenset({1, 8191})), Changed(3)])]


def broker_pages() -> list[bytes]:
    """Return requests to move pages."""
    from kata_pin.rights.broker.pages import PageWindow, render_window

    small = PageWindow(7, 9, 0x7F00_0000_0000, 4096, 20, 10, frozenset({0, 3}), 3, True)
    huge = small._replace(page_size=1 << 30, address=1 << 40, shared=False, near=frozenset({3}))
    return [render_window(small), render_window(huge)]


def encoded(message: Message) -> bytes:
    """Return a protobuf message's bytes."""
    return bytes(message.SerializeToString())
