"""Any bytes either parse or are a ParseError or RemoteProtocolError: nothing else, ever.

Documents are drawn as bytes, and as JSON of the right shape with wrong values inside.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kata_pin.base.errors import ParseError, RemoteProtocolError
from kata_pin.linux import proc
from kata_pin.peers import kata, qemu, vmm_cmdline
from kata_pin.peers.kubelet import checkpoint as kubelet
from kata_pin.peers.oci import Phase, parse_config, parse_state, record
from kata_pin.service import commands
from tests.support.recordings import DATA, files

PARSERS: dict[str, Callable[[bytes], object]] = {
    "state": parse_state,
    "config": parse_config,
    "persist": kata.parse_persist,
    "rs state": kata.parse_rs_state,
    "container state": kata.container_state,
    "kubelet": kubelet.parse_checkpoint,
    "kata config": lambda data: kata.parse_kata_config(data.decode("utf-8", "replace")),
    "request": commands.parse_request,
    "stat": proc.parse_stat,
    "syscall": proc.parse_syscall,
    "cgroup": proc.parse_cgroup,
    "cmdline": proc.parse_cmdline,
    "status": lambda data: proc.status_field(data, "Cpus_allowed_list"),
    "link": lambda data: proc.vcpu_of_link(data.decode("utf-8", "replace")),
}

# Real documents to damage: what a fuzzer needs to get past the first check.
SEEDS = [
    *(path.read_bytes() for path in files("**/run_vc_sbs_p1_persist.json")[:2]),
    (DATA / "kata-3.21/sandbox/hooks2/createRuntime.json").read_bytes(),
    b'{"id":"p1","bundle":"/run/p1","pid":1,"annotations":{"a":"b"}}',
    b'{"linux":{"cgroupsPath":"/a","resources":{"cpu":{"cpus":"0-3","quota":1,"period":1}}}}',
    b'{"policyName":"static","defaultCpuSet":"0","entries":{"p":{"c":"1"}},"checksum":0}',
    b'{"policyName":"static","podEntries":{"p":{"cpuSet":"1"}},"checksum":1}',
    b'{"version":1,"verb":"state","x":1}',
    b"4242 (qemu) S 7 1 1 0 -1 4194560 9" + b" 0" * 12 + b" 5678" + b" 1" * 30 + b"\n",
    b"16 0x21 0xae80 0x0\n",
    b"0::/katalab/kata_p1\n",
    b'[hypervisor.qemu]\npath="/q"\ndefault_vcpus=1\n[runtime]\nsandbox_cgroup_only=true\n',
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A real document with a piece cut out, doubled or replaced."""
    data = draw(st.sampled_from(SEEDS))
    start = draw(st.integers(0, len(data)))
    end = draw(st.integers(start, min(len(data), start + 40)))
    return data[:start] + draw(st.binary(max_size=20)) + data[end:] * draw(st.integers(0, 2))


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.binary(max_size=300) | damaged())
@settings(max_examples=60)
def test_any_bytes_raise_documented_errors_only(name: str, data: bytes) -> None:
    """No parser raises anything but its two errors."""
    with suppress(ParseError, RemoteProtocolError):
        PARSERS[name](data)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["0-3", "0-99999999999", "../x", "p1", "sandbox", "pod_container", "\ud800"])
)
KEYS = """
    id bundle pid annotations linux resources cpu cpus mems quota period shares cgroupsPath
    HypervisorState Config ContainerConfigs ID Annotations Resources Pid HotpluggedVCPUs State
    resource cgroup_state hypervisor policyName defaultCpuSet entries podEntries cpuSet checksum
    data dataChecksum version verb io.kubernetes.cri.container-type io.kubernetes.cri.sandbox-id
    io.katacontainers.pkg.oci.container_type cpu-index thread-id props qom-path socket-id
""".split()  # noqa: SIM905 - a list of forty lines reads worse
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)
objects = st.dictionaries(st.sampled_from(KEYS), values, max_size=8)


@pytest.mark.parametrize("name", ["state", "config", "persist", "rs state", "kubelet", "request"])
@given(document=objects)
@settings(max_examples=60)
def test_any_members_raise_documented_errors_only(name: str, document: dict[str, object]) -> None:
    """Right keys with wrong values are errors that name the place, never a crash."""
    data = json.dumps(document, ensure_ascii=True).encode()
    with suppress(ParseError, RemoteProtocolError):
        PARSERS[name](data)


@given(reply=values | st.lists(objects, max_size=4))
def test_any_qmp_answer_raises_documented_errors_only(reply: object) -> None:
    """Whatever QEMU answers is checked values or a violation."""
    for replies in ((reply, None), (None, reply)):
        with suppress(RemoteProtocolError):
            qemu.check_answers(*replies)


@given(
    words=st.lists(
        st.text(max_size=30)
        | st.sampled_from(["-name", "-smp", "-numa", "-object", "-device", "-qmp", "-machine"])
        | st.builds(
            "{}={},{}={}".format, *[st.sampled_from(["cpus", "id", "sockets", "a", "b"])] * 4
        )
        | st.from_regex(r"(node|cpu|iothread),(cpus|id|socket-id)=[0-9-]{0,12}", fullmatch=True)
        | st.integers().map(str),
        max_size=12,
    )
)
def test_any_command_line(words: list[str]) -> None:
    """A VMM's line always reads: wrong parts are problems, and a named sandbox is an id."""
    command = qemu.parse_qemu(words)
    assert "/" not in command.sandbox_id
    assert len(command.problems) <= 8
    vmm_cmdline.parse_cloud_hypervisor(words)
    vmm_cmdline.parse_firecracker(words)
    vmm_cmdline.parse_shim(words)
    vmm_cmdline.names_sandbox(words, "p1")


markings = st.dictionaries(
    st.sampled_from([key for key in KEYS if "." in key] + ["io.kubernetes.cri-o.ContainerID"]),
    st.sampled_from(["sandbox", "container", "p1", "../x", "", "pod_container"])
    | st.text(max_size=8),
)


@given(
    phase=st.sampled_from(Phase),
    bundle=st.sampled_from(["/run/c1", "/run/c1/userdata", "/", "/a b"]) | st.text(max_size=10),
    id=st.sampled_from(["c1", "p1"]) | st.text(max_size=8),
    marks=markings,
    cpus=st.text(alphabet="0123456789,- x", max_size=20),
)
def test_any_record(phase: Phase, bundle: str, id: str, marks: dict[str, str], cpus: str) -> None:  # noqa: A002 - the state's own word
    """A record has ids that are ids and a note that fits on a line, or there is none."""
    document = {"id": id, "bundle": bundle, "annotations": marks}
    config = {"linux": {"resources": {"cpu": {"cpus": cpus}}}}
    try:
        state = parse_state(json.dumps(document).encode())
        container = record(phase, state, parse_config(json.dumps(config).encode()), stamp_ns=1)
    except ParseError:
        return
    for one in (container.id, container.sandbox_id):
        assert one
        assert one.isascii()
        assert "/" not in one
    assert "\n" not in container.note
    json.dumps(container.note).encode()
