"""The daemon under the exact limits of the shipped systemd unit, applied without systemd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import confined
from tests.support.criserver import CriServer
from tests.support.daemon import Node, assert_unprivileged, private_node
from tests.support.qemu import ROOT, Accelerator, Machine, accelerator
from tests.support.vmmhost import private_debugfs
from tests.support.waiting import wait_for

UNIT = ROOT / "hooks/systemd/kata-pin.service"
GROUP = "nogroup"

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.skipif(
        shutil.which("systemd-analyze") is None, reason="needs systemd-analyze for @system-service"
    ),
]


@pytest.fixture
def node() -> Iterator[Node]:
    """A node below /run, as /tmp is the daemon's own under the unit."""
    with private_node(Path("/run")) as one:
        one.runtime_dir.mkdir(mode=0o750)
        shutil.chown(one.runtime_dir, confined.USER, GROUP)
        yield one


def _prefix(node: Node) -> list[str]:
    return confined.command(UNIT, node.runtime_dir, GROUP, [])


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _sources(node: Node, role: str) -> set[str]:
    threads = node.wait_state("p1", "ok")["threads"]
    return {one["source"] for one in threads if one["role"] == role}


def _capabilities() -> int:
    """Return the bounding set of the unit as the kernel writes it."""
    numbers = {"CAP_DAC_READ_SEARCH": 2, "CAP_NET_ADMIN": 12, "CAP_SYS_PTRACE": 19}
    numbers |= {"CAP_SYS_NICE": 23, "CAP_DAC_OVERRIDE": 1, "CAP_PERFMON": 38}  # linux/capability.h
    names = confined.read_unit(UNIT)["CapabilityBoundingSet"].split()
    return sum(1 << numbers[name] for name in names)


def test_all_of_the_daemon_works_under_the_units_limits(node: Node) -> None:
    """Hooks, pins, QMP, KVM's files, process events, audits, spool, reload and stop all work."""
    node.configure(audit={"affinity_s": 0.1, "deep_s": 0.3}, group=GROUP)
    with private_debugfs(node.root / "debug"):
        daemon = node.start(_prefix(node))
        status = _status(daemon.pid)
        assert int(status["CapBnd"], 16) == _capabilities()
        assert_unprivileged(daemon.pid)
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        with node.pod("p1", machine=Machine(boot=2, maximum=4)) as pod:
            assert pod.announce().stderr == ""
            assert pod.create("c1", "1", exclusive=True).stderr == ""
            assert pod.create("c2", "0").stderr == ""
            assert pod.misplaced({0}, {1: 1}) == []
            watched = wait_for(lambda: node.ask("watch")["pcpus"], "the watch to look", 10)
            assert [one["cpu"] for one in watched] == [1]
            assert node.ask("watch")["problem"] == "", "the broker may open perf events"
            state = node.ask("state")
            assert state["node"]["thread_events"]
            assert _sources(node, "iothread") == {"qmp"}
            pod.kata.shim.plug(1)
            pod.wait_placed({0}, {1: 1})
            if accelerator() is Accelerator.KVM:  # QMP is held: it does not name the new thread
                kernel = {"debugfs", "kvm-fd"}
                wait_for(lambda: _sources(node, "vcpu") & kernel, "a source beside QMP")
            os.sched_setaffinity(pod.kata.pid, {1})  # the audit repairs it
            wait_for(lambda: os.sched_getaffinity(pod.kata.pid) == {0}, "the audit's repair")
            with daemon.hung():
                assert "spooled" in pod.create("c3", "0", "--record-ms=100").stderr
            wait_for(lambda: "c3" in node.registered() and not node.spooled(), "the spool")
            pod.persist("c2", "0-1")
            wait_for(lambda: str(node.registered()["c2"].cpus) == "0-1", "Kata's state")
            daemon.reload()
            assert node.ask("unpin", sandbox=pod.id)["sandboxes"]
            assert pod.misplaced({0, 1}) == []
        wait_for(lambda: not node.sandboxes(), "the sandbox to end")
        assert os.stat(node.runtime_dir / "status.sock").st_mode & 0o777 == 0o660
        assert daemon.terminate() == 0
        assert list(node.runtime_dir.glob("*.sock")) == []
        for bad in (
            "Traceback",
            "ERROR",
            "failed",
            "only by audits",
            "only at the next audit",
            "only audits",
        ):
            assert bad not in node.log


@pytest.mark.skipif(accelerator() is not Accelerator.KVM, reason="needs KVM's descriptors")
def test_descriptors_and_system_calls_are_read_under_the_units_limits(node: Node) -> None:
    """Without debugfs and QMP vCPUs are known by them; their files are of root, not of our user."""
    node.configure(group=GROUP)
    node.start(_prefix(node))
    with node.pod("p1", machine=Machine(boot=2, maximum=4)) as pod:
        pod.create("c1", "1", exclusive=True)
        shown = node.wait_state("p1", "ok")
        assert [t["source"] for t in shown["threads"] if t["role"] == "vcpu"] == ["kvm-fd"] * 2


_PROBE = """
import ctypes, mmap, os, socket, sys
def refused(what, *arguments, **more):
    try:
        what(*arguments, **more)
    except OSError:
        return True
    return False
libc = ctypes.CDLL(None, use_errno=True)
results = {
    "write /etc": refused(os.mkdir, "/etc/kata-pin-probe"),
    "write /run": refused(os.mkdir, "/run/kata-pin-probe"),
    "write cgroup": refused(os.mkdir, "/sys/fs/cgroup/kata-pin-probe"),
    "write sysctl": refused(open, "/proc/sys/kernel/hostname", "w"),
    "inet socket": refused(socket.socket, socket.AF_INET),
    "crypto socket": refused(socket.socket, socket.AF_ALG, socket.SOCK_SEQPACKET),
    "unshare": libc.unshare(0x20000) == -1,
    "mount": libc.mount(b"none", b"/tmp", b"tmpfs", 0, b"") == -1,
    "reboot": libc.reboot(0) == -1,
    "kvm": not os.path.exists("/dev/kvm"),
    "setuid": refused(os.setuid, 0),
    "chown": refused(os.chown, sys.argv[1], 0, 0),
    "memory": refused(mmap.mmap, -1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC),
    "memlock": libc.mlock(ctypes.create_string_buffer(1), 1) == -1,
    "keyring": libc.syscall(250, 0, -3, 0) == -1,  # keyctl: KEYCTL_GET_KEYRING_ID
    "another's memory": libc.process_vm_readv(os.getpid(), 0, 0, 0, 0, 0) == -1,
    "homes": not os.listdir("/home"),
    "set-uid file": refused(os.chmod, sys.argv[1], 0o4755),
    "realtime": refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)),
    "runtime directory": not refused(os.mkdir, sys.argv[1] + "/probe"),
    "unix socket": not refused(socket.socket, socket.AF_UNIX),
    "netlink socket": not refused(socket.socket, socket.AF_NETLINK, socket.SOCK_DGRAM, 11),
    "uevents": not refused(socket.socket, socket.AF_NETLINK, socket.SOCK_DGRAM, 15),
    "affinity": not refused(os.sched_setaffinity, 0, os.sched_getaffinity(0)),
}
print([name for name, held in results.items() if not held])
"""


_BY_CRI = """
import asyncio, sys
from kata_pin.base.cpuset import CpuSet
from kata_pin.peers.cri import CriClient
from kata_pin.peers.nri.replies import Cpuset
asyncio.run(CriClient(sys.argv[1]).update("c1", Cpuset(CpuSet([0, 1]))))
print("done")
"""


def test_the_runtimes_socket_can_be_called(node: Node) -> None:
    """CRI's library works without IP sockets, and reaches a socket that is not our own."""
    path = node.root / "cri.sock"
    with CriServer(path) as server:
        done = subprocess.run(
            [*_prefix(node), sys.executable, "-c", _BY_CRI, str(path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
            cwd=ROOT,
        )
        assert done.stdout.strip() == "done", done.stdout + done.stderr
        assert server.asked == [("c1", "0-1")]


def test_the_limits_are_really_in_force(node: Node) -> None:
    """What the unit forbids fails and what it grants works: the test above proves something."""
    done = subprocess.run(
        [*_prefix(node), sys.executable, "-c", _PROBE, str(node.runtime_dir)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_every_directive_is_dealt_with(tmp_path: Path) -> None:
    """A directive that the unit gains must be applied here, or named as not applicable."""
    assert confined.read_unit(UNIT)["NoNewPrivileges"] == "yes"
    changed = tmp_path / "changed.service"
    changed.write_text(UNIT.read_text().replace("[Install]", "ProtectProc=invisible\n[Install]"))
    with pytest.raises(ValueError, match="nothing here applies ProtectProc"):
        confined.read_unit(changed)


def test_a_reload_runs_as_root() -> None:
    """The control socket trusts root alone, not the user that the unit names."""
    assert confined.read_unit(UNIT)["ExecReload"].startswith("!@PROGRAM@ reload")
