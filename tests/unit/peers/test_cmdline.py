"""Command lines: Kata's real forms, QEMU's syntax, and hostile lines."""

from __future__ import annotations

import time

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.peers import qemu as peers_qemu
from kata_pin.peers import vmm_cmdline as qemuopts
from kata_pin.peers.qemu import parse_qemu
from kata_pin.peers.vmm_cmdline import VmmCommand


def qemu(*arguments: str) -> VmmCommand:
    return parse_qemu(["/usr/bin/qemu-system-x86_64", *arguments])


@pytest.mark.parametrize(
    ("value", "sandbox"),
    [
        ("sandbox-p1", "p1"),
        ("sandbox-p1,debug-threads=on", "p1"),
        ("guest=sandbox-p1,debug-threads=off", "p1"),
        ("debug-threads=on,guest=sandbox-p1", "p1"),
        ("sandbox-a-b.c_d", "a-b.c_d"),
        ("vm1", ""),
        ("sandbox-", ""),
        ("sandbox-../x", ""),
        ("sandbox-a,,b", ""),
        ("", ""),
    ],
)
def test_name(value: str, sandbox: str) -> None:
    """-name gives the sandbox only when what follows `sandbox-` is an id."""
    command = qemu("-name", value)
    assert command.sandbox_id == sandbox


def test_an_argument_that_looks_like_an_option() -> None:
    """-append takes what follows, whatever it looks like: a kernel line cannot name a sandbox."""
    command = qemu(
        "-name", "sandbox-p1", "-append", "-name", "sandbox-x", "-nographic", "-smp", "3"
    )
    assert (command.sandbox_id, command.guest.boot) == ("p1", 3)


def test_the_last_name_counts() -> None:
    """QEMU merges repeated -name options: the last guest= wins, as in QEMU."""
    assert qemu("-name", "sandbox-a", "--name", "sandbox-b").sandbox_id == "b"


@pytest.mark.parametrize(
    ("arguments", "kvm"),
    [
        (["-machine", "q35,accel=kvm"], True),
        (["-machine", "pc,accel=tcg"], False),
        (["-M", "q35,accel=kvm:tcg"], True),
        (["-machine", "type=q35,accel=tcg:kvm"], False),
        (["-accel", "kvm"], True),
        (["-accel", "kvm,kernel-irqchip=on"], True),
        (["-accel", "accel=tcg,thread=multi"], False),
        (["-accel", "tcg", "-accel", "kvm"], False),
        (["-enable-kvm"], True),
        (["--enable-kvm"], True),
        (["-machine", "q35"], False),
        ([], False),
    ],
)
def test_accelerator(arguments: list[str], *, kvm: bool) -> None:
    """The first accelerator asked for says whether vCPUs are KVM's."""
    assert qemu(*arguments).kvm is kvm


def test_iothreads() -> None:
    """iothread objects in both syntaxes, each once; other objects are none."""
    command = qemu(
        "-object", "iothread,id=iothread-93faf1dd31a4eabb",
        "-object", "qom-type=iothread,id=b",
        "-object", '{"qom-type":"iothread","id":"c","poll-max-ns":0}',
        "-object", "iothread,id=b",
        "-object", "rng-random,id=rng0",
        "-object", "iothread",
    )  # fmt: skip
    assert command.iothreads == ("iothread-93faf1dd31a4eabb", "b", "c")


def test_guest_cid() -> None:
    """The vsock address comes from the vhost-vsock device, in both syntaxes."""
    device = "vhost-vsock-pci,disable-modern=true,vhostfd=4,id=vsock-39,guest-cid=3960766453"
    assert qemu("-device", device).guest_cid == 3960766453
    assert qemu("-device", '{"driver":"vhost-vsock-ccw","guest-cid":7}').guest_cid == 7
    assert qemu("-device", "virtio-net-pci,guest-cid=9").guest_cid == 0


def test_kernel() -> None:
    """The guest's kernel is named by its path, the last one counts."""
    assert qemu("-kernel", "/a/vmlinuz", "-kernel", "/b/vmlinux").kernel == "/b/vmlinux"
    assert qemu().kernel == ""


@pytest.mark.parametrize("cid", ["2", "99999999999999", "x", "-1", "4294967296"])
def test_an_absurd_cid_is_a_problem(cid: str) -> None:
    """A cid that vsock reserves or cannot have is reported and not used."""
    command = qemu("-device", f"vhost-vsock-pci,guest-cid={cid}")
    assert command.guest_cid == 0
    assert "guest-cid" in command.problems[0]


def test_numa_of_kata() -> None:
    """Kata's multi-node form: cpus of each guest node, host nodes of its memory."""
    command = qemu(
        "-smp", "4,sockets=2,cores=2,threads=1,maxcpus=4",
        "-object", "memory-backend-ram,id=numa-mem0,size=1G,host-nodes=0,policy=bind",
        "-object", "memory-backend-ram,id=numa-mem1,size=1G,host-nodes=1-2,policy=bind",
        "-numa", "node,nodeid=0,cpus=0-1,memdev=numa-mem0",
        "-numa", "node,nodeid=1,cpus=2,cpus=3,memdev=numa-mem1",
        "-numa", "dist,src=0,dst=1,val=20",
    )  # fmt: skip
    assert command.guest.numa == {0: 0, 1: 0, 2: 1, 3: 1}
    assert command.guest.host_nodes == {0: CpuSet([0]), 1: CpuSet([1, 2])}
    assert command.problems == ()


@pytest.mark.parametrize(
    "arguments",
    [
        ["-smp", "99999999999999999999"],
        ["-smp", "cpus=4294967296"],
        ["-smp", "5,maxcpus=4"],
        ["-smp", "4,sockets=3"],
        ["-smp", "x"],
        ["-smp", "-1"],
        ["-smp", "²"],
    ],
)
def test_an_absurd_smp_does_not_hide_the_sandbox(arguments: list[str]) -> None:
    """The sandbox is still named; the topology is unknown and the problem said."""
    command = qemu("-name", "sandbox-p1", *arguments)
    assert (command.sandbox_id, command.guest.boot) == ("p1", 0)
    assert "-smp" in command.problems[0]


def test_an_absurd_numa_keeps_the_topology() -> None:
    """What -smp said stays known."""
    command = qemu("-smp", "4", "-numa", "node,cpus=0-99999999999")
    assert (command.guest.boot, command.guest.numa) == (4, {})
    assert "-numa" in command.problems[0]


def test_a_line_of_thousands() -> None:
    """Thousands of options are read in little time, and refused beyond the bound."""
    start = time.process_time()
    many = [word for n in range(8000) for word in ("-object", f"iothread,id=i{n}")]
    command = qemu("-name", "sandbox-p1", *many[:15_000])
    assert (command.sandbox_id, len(command.iothreads)) == ("p1", peers_qemu.MAX_IOTHREADS)
    assert len(command.problems) == 8
    with pytest.raises(ParseError, match="more than 16384 arguments"):
        qemu(*["x"] * 20_000)
    assert time.process_time() - start < 3


def test_one_enormous_argument() -> None:
    """An argument with 100,000 properties is a problem, not a wait."""
    command = qemu("-name", "sandbox-p1", "-smp", "1," * 100_000)
    assert command.guest.boot == 0
    assert "more than" in command.problems[0]


def test_nothing_at_all() -> None:
    """An empty line (a zombie's) and a lone program name are a VMM without a name."""
    assert parse_qemu([]).sandbox_id == ""
    assert qemu().sandbox_id == ""
    assert qemu("-name").sandbox_id == ""


def test_properties() -> None:
    """Doubled commas, bare keys, repeated keys, switches."""
    assert qemuopts.properties("a=1,b=x,,y,a=2,c,nod", first="z") == {
        "a": ["1", "2"],
        "b": ["x,y"],
        "c": ["on"],
        "d": ["off"],
    }
    assert qemuopts.properties("v,k=1", first="z") == {"z": ["v"], "k": ["1"]}
    assert qemuopts.properties('{"a":true,"b":[1,"x"],"c":null}') == {
        "a": ["on"],
        "b": ["1", "x"],
        "c": [""],
    }


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["-numa", "cpu"] * 8180, id="cpu"),
        pytest.param(["-numa", "node," + "cpus=0-4095," * 300] * 20, id="ranges"),
        pytest.param(["-numa", "cpu,core-id=1"] * 8180, id="one each"),
        pytest.param(["-numa", "node,cpus=" + "0,,1,," * 8000 + "3"], id="a long list"),
    ],
)
def test_a_line_that_takes_long(arguments: list[str]) -> None:
    """82 KiB that name every vCPU thousands of times: a problem, and the sandbox is still named."""
    start = time.process_time()
    command = qemu("-name", "sandbox-p1", "-smp", "4096", *arguments)
    assert time.process_time() - start < 0.5
    assert (command.sandbox_id, command.guest.numa) == ("p1", {})
    assert "more" in command.problems[0]


def test_the_name_alone() -> None:
    """A stranger's line is read for its name; the rest is not looked at."""
    line = ["qemu", "-smp", "x", "-name", "sandbox-p1,debug-threads=on", "-numa", "cpu"]
    assert peers_qemu.parse_qemu_name(line) == VmmCommand("p1")
    assert peers_qemu.parse_qemu_name(["qemu", "-append", "-name", "sandbox-p1"]) == VmmCommand()
    with pytest.raises(ParseError, match="more than 64 names"):
        peers_qemu.parse_qemu_name(["qemu", *["-name", "a"] * 65])


def test_monitors() -> None:
    """Whether QEMU makes a thread for monitors follows from its options, not from their values."""
    assert qemu("-qmp", "unix:fd=3").monitor
    assert qemu("--qmp-pretty", "stdio").monitor
    assert not qemu("-append", "-qmp").monitor


def test_a_copy_of_a_template() -> None:
    """What Kata starts to load a state, whatever the state's place."""
    assert qemu("-incoming", "defer").loads
    assert not qemu("-append", "-incoming").loads
