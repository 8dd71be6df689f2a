"""-smp, -numa and APIC ids against QEMU and KVM themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kata_pin.linux import proc
from kata_pin.peers import qemu

QEMU = shutil.which("qemu-system-x86_64")
HAS_KVM = os.access("/dev/kvm", os.R_OK | os.W_OK)

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.skipif(QEMU is None, reason="no qemu-system-x86_64"),
]

MEMORY = [
    "-object",
    "memory-backend-ram,id=a,size=32M",
    "-object",
    "memory-backend-ram,id=b,size=32M",
]
"""QEMU wants memory for each node of a guest."""

SHAPES = [
    pytest.param(["-smp", "2,cores=1,threads=1,sockets=16,maxcpus=16"], id="Kata Go"),
    pytest.param(["-smp", "2,maxcpus=8"], id="runtime-rs"),
    pytest.param(["-smp", "3"], id="one number"),
    pytest.param(["-smp", "2", "-smp", "maxcpus=6"], id="merged"),
    pytest.param(["-smp", "12,sockets=2,cores=3,threads=2"], id="gaps in APIC ids"),
    pytest.param(["-smp", "12,sockets=2,dies=2,cores=3"], id="dies"),
    pytest.param(["-smp", "6,threads=3,cores=2"], id="three threads"),
    pytest.param(["-machine", "pc-q35-6.1", "-smp", "4,maxcpus=6"], id="sockets before cores"),
    pytest.param(["-machine", "pc-q35-6.2", "-smp", "4,maxcpus=6"], id="cores before sockets"),
    pytest.param(
        [*MEMORY, "-smp", "8,sockets=4", "-numa", "node,memdev=a", "-numa", "node,memdev=b"],
        id="nodes in turn",
    ),
    pytest.param(
        [
            *MEMORY,
            *("-smp", "4,sockets=2"),
            *("-numa", "node,memdev=a,cpus=0,cpus=1"),
            *("-numa", "node,nodeid=1,memdev=b,cpus=2-3"),
        ],
        id="nodes by index",
    ),
    pytest.param(
        [
            *MEMORY,
            *("-smp", "4,sockets=2"),
            *("-numa", "node,memdev=a", "-numa", "node,memdev=b"),
            *("-numa", "cpu,node-id=0,socket-id=1", "-numa", "cpu,node-id=1,socket-id=0"),
        ],
        id="nodes by place",
    ),
]


class Session:
    """A real QEMU, stopped before its first instruction, with QMP on its own pipes."""

    def __init__(self, process: subprocess.Popen[bytes], argv: list[str]) -> None:
        self.process = process
        self.argv = argv

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"execute": command}).encode() + b"\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            message = json.loads(line)
            if "return" in message:
                return message["return"]
        raise AssertionError(f"QEMU left: {self.process.wait(30)}")

    def cpus(self) -> dict[int, dict[str, int]]:
        """Return the place of each vCPU by cpu-index, and see that the answers check out."""
        self.ask("qmp_capabilities")
        cpus = self.ask("query-cpus-fast")
        assert len(qemu.check_answers(cpus, self.ask("query-iothreads")).cpus) == len(cpus)
        return {cpu["cpu-index"]: cpu["props"] for cpu in cpus}


@contextmanager
def running(arguments: list[str], accel: str) -> Iterator[Session]:
    machine = [] if "-machine" in arguments else ["-machine", "q35"]
    rest = ["-accel", accel, "-S", "-display", "none", "-nodefaults", "-m", "64", "-qmp", "stdio"]
    argv = [str(QEMU), "-name", "sandbox-p1", *machine, *rest, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        try:
            yield Session(process, argv)
        finally:
            process.kill()


@pytest.mark.parametrize("arguments", SHAPES)
def test_topology(arguments: list[str]) -> None:
    """QEMU's own count, places and nodes of its vCPUs are those read from its command line."""
    with running(arguments, "kvm" if HAS_KVM else "tcg") as session:
        cpus = session.cpus()
        slots = session.ask("query-hotpluggable-cpus")
    command = qemu.parse_qemu(session.argv)
    guest = command.guest
    assert command.problems == ()
    assert (len(cpus), len(slots)) == (guest.boot, guest.maximum)
    for index, said in cpus.items():
        shown = (said["socket-id"], said.get("die-id", 0), said["core-id"], said["thread-id"])
        assert shown == qemu.place_of(guest, index)
        if guest.numa:
            assert guest.numa[index] == said["node-id"]


@pytest.mark.skipif(not HAS_KVM, reason="no /dev/kvm")
@pytest.mark.parametrize("arguments", SHAPES)
def test_apic_ids(arguments: list[str]) -> None:
    """KVM's vCPU ids, as its descriptors show them, are the APIC ids computed here."""
    with running(arguments, "kvm") as session:
        boot = list(session.cpus())
        folder = f"/proc/{session.process.pid}/fd"
        links = [proc.vcpu_of_link(os.readlink(f"{folder}/{fd}")) for fd in os.listdir(folder)]
    guest = qemu.parse_qemu(session.argv).guest
    ids = sorted(vcpu for vcpu in links if vcpu is not None)
    assert ids == sorted(qemu.apic_id(guest, index) for index in boot)
    assert [qemu.cpu_index(guest, vcpu) for vcpu in ids] == sorted(boot)


@pytest.mark.parametrize(
    "smp",
    [
        "2,maxcpus=1",
        "4,sockets=3",
        "2,sockets=99",
        "2,maxcpus=5,sockets=2",
        "x",
        "6,sockets=2,cores=2,threads=2",
        "4,cores=3,threads=1,sockets=1",
    ],
)
def test_refusals(smp: str) -> None:
    """What is refused here, QEMU refuses too: no running machine is left without a topology."""
    assert qemu.parse_qemu(["qemu", "-smp", smp]).problems
    argv = [str(QEMU), "-accel", "tcg", "-S", "-display", "none", "-nodefaults", "-smp", smp]
    result = subprocess.run(argv, capture_output=True, timeout=30, check=False, text=True)
    assert result.returncode == 1
    assert "smp" in result.stderr.lower() or "cpu" in result.stderr.lower()


def test_cmdline_of_a_living_qemu() -> None:
    """The line as /proc shows it reads the same as the one that was given."""
    with running(["-smp", "2"], "tcg") as session:
        session.ask("qmp_capabilities")
        with open(f"/proc/{session.process.pid}/cmdline", "rb") as file:
            shown = proc.parse_cmdline(file.read())
    assert list(shown) == session.argv
    assert qemu.parse_qemu(shown).sandbox_id == "p1"
