"""Interfaces of real network namespaces: taps, veths and tc redirects, and a real QEMU's tap."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kata_pin.base.documents.state import Interface
from kata_pin.base.errors import HostError, TaskGone
from kata_pin.cli.reports.activity import read_network
from kata_pin.linux import network as linux_network
from kata_pin.linux.descriptors import read_descriptors
from kata_pin.linux.files import HOST
from kata_pin.linux.network import interfaces
from kata_pin.linux.process import read_process
from tests.support.qemu import QEMU
from tests.support.waiting import wait_for
from tests.unit.cli import documents as docs

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("tc") is None or not os.path.exists("/dev/net/tun"),
        reason="needs root, iproute2 and /dev/net/tun",
    ),
]

TCFILTER = """
ip link add eth0 type veth peer name outside
ip tuntap add dev tap0_kata mode tap multi_queue
for pair in eth0:tap0_kata tap0_kata:eth0; do
    tc qdisc add dev ${pair%:*} ingress
    tc filter add dev ${pair%:*} parent ffff: protocol all u32 match u8 0 0 \\
        action mirred egress redirect dev ${pair#*:}
done
"""
"""What Kata's network model tcfilter makes of a pod's interface."""

HOLDER = """
import fcntl, os, struct, sys
for name in sys.argv[1:]:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1102))  # TAP, MULTI_QUEUE
print("ready", flush=True)
sys.stdin.read()
"""
"""A process with one queue per argument, as QEMU has."""


@contextmanager
def _namespace(setup: str, *argv: str) -> Iterator[int]:
    """Run a program in a network namespace of its own, and return its pid once it is ready."""
    script = f'set -e\n{setup}\necho ready\nexec "$@"'
    command = ["unshare", "-n", "sh", "-c", script, "sh", *argv]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            for _ in range(1 + (HOLDER in argv)):
                assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


def _holder(*names: str) -> tuple[str, ...]:
    return (sys.executable, "-c", HOLDER, *names)


def test_tap_veth_and_their_redirect() -> None:
    """The tap that the process has open, with its queues, and the veth that feeds it."""
    with _namespace(TCFILTER, *_holder("tap0_kata", "tap0_kata")) as pid:
        found = {one.name: one for one in interfaces(HOST, pid)}
    tap = Interface("tap0_kata", "tap", 2, peer="eth0", attached=True)
    assert found["tap0_kata"] == tap
    assert (found["eth0"].kind, found["eth0"].peer) == ("veth", "tap0_kata")
    assert (found["outside"].peer, found["outside"].attached) == ("", False)
    assert "lo" not in found


def test_macvtap() -> None:
    """A macvtap names its lower device, whether or not the process has it open."""
    setup = "ip link add eth0 type veth peer name outside; ip link add tap0 link eth0 type macvtap"
    with _namespace(setup, "sleep", "60") as pid:
        found = {one.name: (one.kind, one.peer) for one in interfaces(HOST, pid)}
    assert found["tap0"] == ("macvtap", "eth0")


def test_the_caller_stays_where_it_is() -> None:
    """Neither its namespace changes, nor is a thread or a descriptor left."""
    with _namespace(TCFILTER, "sleep", "60") as pid:
        interfaces(HOST, pid)  # imports
        before = _self()
        interfaces(HOST, pid)
        assert _self() == before


def _self() -> tuple[str, int, list[str]]:
    namespace = os.readlink("/proc/thread-self/ns/net")
    return namespace, threading.active_count(), sorted(os.listdir("/proc/self/fd"))


def test_a_namespace_full_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compromised VMM cannot make the answer endless."""
    monkeypatch.setattr(linux_network, "MAX_LINKS", 3)
    with (
        _namespace(TCFILTER, "sleep", "60") as pid,
        pytest.raises(HostError, match="more than 3"),
    ):
        interfaces(HOST, pid)


@pytest.mark.parametrize(("name", "shown"), [("a\\033[31m", "a?[31m"), ("a\\377", "a\\xff")])
def test_names_to_fool_readers(name: str, shown: str) -> None:
    """Names may hold escape sequences, and bytes that are no text."""
    setup = f"ip link add \"$(printf '{name}')\" type veth peer name b"
    with _namespace(setup, "sleep", "60") as pid:
        assert {one.name for one in interfaces(HOST, pid)} == {shown, "b"}


def test_nobody() -> None:
    """A process that has exited is TaskGone."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(TaskGone):
        interfaces(HOST, process.pid)


@pytest.mark.qemu
@pytest.mark.skipif(not Path(QEMU).exists(), reason="no qemu-system-x86_64")
def test_the_tap_of_a_real_qemu() -> None:
    """QEMU's tap, with two queues; with vhost where the kernel has it, each with a worker."""
    vhost = os.path.exists("/dev/vhost-net")
    tap = "tap,id=n0,ifname=tap0_kata,queues=2,script=no,downscript=no"
    tap += ",vhost=on" if vhost else ""
    argv = (
        *(QEMU, "-name", "sandbox-netns", "-machine", "q35,accel=tcg", "-m", "16M", "-S"),
        *("-nodefaults", "-nographic", "-netdev", tap),
        *("-device", "virtio-net-pci,netdev=n0,mq=on,vectors=6"),
    )
    with _namespace(TCFILTER, *argv) as pid:
        wait_for(lambda: len(read_descriptors(HOST, pid).queues) == 2, "QEMU's queues")
        found = {one.name: one for one in interfaces(HOST, pid)}
        one = found["tap0_kata"]
        assert (one.kind, one.queues, one.peer, one.attached) == ("tap", 2, "eth0", True)
        assert len(one.served_by) == (2 if vhost else 0)
        assert not any(worker.inferred for worker in one.served_by)
        born = read_process(HOST, pid).key.starttime
        sandbox = docs.sandbox("a/b", None, vmm=docs.vmm(pid=pid, starttime=born))
        network = read_network(sandbox)  # no vhost worker in the document: the tap is enough
        assert network is not None
        assert network.interfaces == tuple(found.values())
