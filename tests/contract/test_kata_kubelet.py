"""Kata 3.32 under a kubelet's static policy, as recorded: found, read and placed today.

The recording (tests/data/kata-3.32-kubelet-1.34) is laid out as a host, so that what is under test
is all that a pass does but for setting affinities. The masks it must come to are those that were
seen on that node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.placement import KubeletState, Node, Placement
from kata_pin.base.sandbox import (
    PF_KTHREAD,
    PF_USER_WORKER,
    Container,
    Role,
    Sandbox,
    Task,
    Thread,
    Vmm,
)
from kata_pin.base.threads import ThreadKey as Key
from kata_pin.base.values import ContainerKind, RoleSource, ThreadRole
from kata_pin.peers.kata import parse_persist, to_containers
from kata_pin.peers.kubelet.checkpoint import parse_checkpoint
from kata_pin.vmm.claims import Shims
from kata_pin.vmm.find import VmmFinder, find_helpers
from kata_pin.vmm.role_cache import RoleCache
from tests.support import recordings
from tests.support.at_once import identify, place
from tests.support.hosttree import FakeHost
from tests.support.vmmhost import facts
from tests.support.world import flat

RECORDED = recordings.DATA / "kata-3.32-kubelet-1.34"
POD = "f6b64317a3356ab7214fbf39c6c9347de215430079b0d9706c8df35e60600922"
QEMU, SHIM, SERVERS = 3803, 3766, (3801, 3806)
CPUSET = "0-2,5-15"  # as cgroups.txt has it
IOTHREAD, MONITOR, BOOT, HOTPLUGGED, UNPLUGGED = 3812, 3817, 3818, 4591, 4599


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """The node of the recording; pids are start times too."""
    one = FakeHost(tmp_path, online=range(16))
    for line in (RECORDED / "processes.txt").read_text().splitlines():
        match = re.match(
            r"pid (\d+) ppid (\d+) comm (.*?) cpus .*? cgroup \[':(.*?)'\] :: (.*)$", line
        )
        assert match is not None, line
        pid, argv = int(match[1]), match[5].split()
        one.process(
            pid,
            ppid=int(match[2]),
            comm=match[3],
            starttime=pid,
            cgroup=f"0::{match[4]}",
            flags=0 if argv else PF_KTHREAD,
        )
        if argv:
            _be(one, pid, recordings.argv(RECORDED / "qemu-cmdline.txt") if pid == QEMU else argv)
    for thread in recordings.threads(RECORDED / "qemu-threads.txt"):
        one.thread(QEMU, thread.tid, comm=thread.comm, starttime=thread.tid)
    for line in (RECORDED / "debugfs-vcpus.txt").read_text().splitlines():
        folder, tid = line.split()
        file = Path(one.root.debug("kvm", folder, "pid"))
        file.parent.mkdir(parents=True)
        file.write_text(f"{tid}\n")
    for source in RECORDED.glob(f"run_vc_*{POD}_p*"):
        parts = source.name.removeprefix("run_").split("_")
        file = tmp_path.joinpath("run", *parts)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(source.read_bytes())
    return one


def _be(host: FakeHost, pid: int, argv: Sequence[str]) -> None:
    """Give a process its command line, its executable, and root as its owner."""
    home = host.folder / "proc" / str(pid)
    (home / "exe").unlink()
    (home / "exe").symlink_to(argv[0])
    (home / "cmdline").write_bytes("".join(f"{arg}\0" for arg in argv).encode())
    (home / "status").write_text(f"Tgid:\t{pid}\nUid:\t0\t0\t0\t0\n")


def _checkpoint() -> KubeletState:
    return parse_checkpoint((RECORDED / "cpu_manager_state").read_bytes())


def _tasks(cpuset: str = CPUSET) -> list[Task]:
    return [
        Task(
            key=Key(QEMU, one.tid, one.tid),
            comm=one.comm,
            flags=PF_USER_WORKER if one.comm.startswith(("vhost-", "kvm-")) else 0,
            affinity=CpuSet.parse(one.cpus),
            cpuset=CpuSet.parse(cpuset),
            cgroup=one.cgroup.decode().strip().removeprefix("0::"),
        )
        for one in recordings.threads(RECORDED / "qemu-threads.txt")
    ]


def _containers() -> tuple[Container, ...]:
    return to_containers(
        parse_persist(next(RECORDED.glob(f"run_vc_sbs_{POD}_persist.json")).read_bytes())
    )


def _vmm(host: FakeHost) -> Vmm:
    return VmmFinder(facts(host.root)).find(POD)


def _roles(host: FakeHost) -> dict[int, Role]:
    roles = identify(facts(host.root), _vmm(host), _tasks(), RoleCache(), machine="x86_64")
    return {key.tid: role for key, role in roles.items()}


def _placed(
    host: FakeHost, kubelet: KubeletState, cpuset: str = CPUSET
) -> tuple[list[Thread], Placement]:
    """Return the threads and their placement by a checkpoint and the cpuset of their cgroup."""
    roles, vmm = _roles(host), _vmm(host)
    threads = [Thread(task, roles[task.key.tid]) for task in _tasks(cpuset)]
    keys = [one.key for one in threads]
    for helper in find_helpers(facts(host.root), vmm, POD, keys, Shims(facts(host.root))):
        process = helper.process
        key = Key(process.pid, process.pid, process.starttime)
        task = Task(key, "", 0, EMPTY, CpuSet(range(16)), f"/kata_overhead/{POD}")
        threads.append(Thread(task, Role(helper.role, helper.source)))
    node = Node(flat(16), kubelet=kubelet)
    return threads, place(Sandbox(POD, _containers(), vmm), threads, node)


def test_the_vmm_is_found(host: FakeHost) -> None:
    """Among three VMs, by its shim, with what its command line says."""
    vmm = _vmm(host)
    assert (vmm.process.pid, vmm.parent, vmm.orphan) == (QEMU, SHIM, False)
    assert vmm.witness == f"its parent, the sandbox's shim (pid {SHIM})"
    assert (vmm.guest.boot, vmm.guest.maximum, vmm.kvm, vmm.monitor) == (1, 16, True, True)
    assert vmm.iothreads == ("iothread-60071b566932c05c",)


def test_roles(host: FakeHost) -> None:
    """Without names and with QMP held: both vCPUs, though KVM still names the unplugged one."""
    roles = _roles(host)
    vcpus = {tid: (r.vcpu, r.source) for tid, r in roles.items() if r.role is ThreadRole.VCPU}
    assert vcpus == {BOOT: (0, RoleSource.DEBUGFS), HOTPLUGGED: (15, RoleSource.DEBUGFS)}
    assert UNPLUGGED not in roles
    assert roles[IOTHREAD].iothread == "iothread-60071b566932c05c"
    assert roles[MONITOR] == Role(ThreadRole.EMULATOR, RoleSource.ORDER)
    assert {roles[tid].role for tid in (3815, 3826)} == {ThreadRole.VHOST}
    assert not any(role.conflict for role in roles.values())


def test_helpers(host: FakeHost) -> None:
    """virtiofsd with its sandboxed half, the shim and KVM's timer of this VM, of no other."""
    found = find_helpers(
        facts(host.root), _vmm(host), POD, [task.key for task in _tasks()], Shims(facts(host.root))
    )
    assert {one.process.pid: one.role for one in found} == {
        SHIM: ThreadRole.SHIM,
        **dict.fromkeys(SERVERS, ThreadRole.VIRTIOFSD),
        3823: ThreadRole.KVM,
    }


def test_containers() -> None:
    """persist.json has what the kubelet gave; with the checkpoint, whose CPUs are exclusive."""
    pause, app, log = _containers()
    assert (pause.kind, pause.cpus) == (ContainerKind.SANDBOX, None)
    assert (app.name, str(app.cpus), app.quota_us) == ("app", "1-2", -1)
    assert (log.name, str(log.cpus), log.quota_us) == ("log", "0,5-15", 50_000)


def test_masks_are_those_of_that_node(host: FakeHost) -> None:
    """Two vCPUs on the two exclusive CPUs, everything else on the shared ones, nobody on g2's."""
    threads, placement = _placed(host, _checkpoint())
    applied = {
        one.key.tid: str(placement.desired[one.key].applied)
        for one in threads
        if one.key in placement.desired
    }
    recorded = {one.tid: one.cpus for one in recordings.threads(RECORDED / "qemu-threads.txt")}
    assert applied == recorded | dict.fromkeys((*SERVERS, 3823), "0,5-15")
    assert [note.code for note in placement.notes] == ["shared-without-vcpu"]


def test_a_dying_vm_on_cpus_that_were_given_away(host: FakeHost) -> None:
    """The kubelet drops the entry first, and Kata keeps the VM on its CPUs until it ends: said."""
    recorded = _checkpoint()
    ours, theirs = "00000000-0000-4000-8000-000000000004", "00000000-0000-4000-8000-000000000005"
    entries = {uid: given for uid, given in recorded.entries.items() if uid != ours}
    entries[theirs] = {"app": CpuSet.parse("1-2")}
    threads, placement = _placed(host, replace(recorded, entries=entries), "1-2")
    inside = [one for one in threads if str(one.task.cpuset) == "1-2"]
    assert {str(placement.desired[one.key].applied) for one in inside} == {"1-2"}
    free = [one for one in threads if one not in inside and one.key in placement.desired]
    assert {str(placement.desired[one.key].applied) for one in free} == {"0,5-15"}
    assert {"held-by-others", "runs-on-others"} <= {note.code for note in placement.notes}
