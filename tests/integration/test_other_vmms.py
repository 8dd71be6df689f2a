"""VMMs other than QEMU under the daemon, which has no rights: found, identified, pinned.

They are in no registry. Stand-ins with a real VM have the executables, command lines, jails,
folders and thread names that were seen of the real ones (tests/support/vmm_standin.py); the real
ones run where they are on PATH (tests/support/real_vmms.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import real_vmms, stopped, vmm_standin
from tests.support.daemon import Node, Pod, assert_unprivileged, private_node
from tests.support.katalike import KataSandbox
from tests.support.qemu import Accelerator, accelerator
from tests.support.shim_process import ProcessShim
from tests.support.specimen import two_cpus
from tests.support.vmm_standin import Spec, copy_of_python, enter_jail, jailed_pid
from tests.support.vmmhost import private_debugfs
from tests.support.waiting import wait_for

pytestmark = pytest.mark.root

SANDBOX = f"{os.getpid():032x}".ljust(64, "f")
CUT = SANDBOX[:32]
USER = 4242


@dataclass(frozen=True)
class Started:
    """A running VMM: `hook_pid` is what Kata's hooks report, `last` its last two vCPU threads.

    `kinds` are the roles of its other threads by name, `makers` the thread that made the VM.
    """

    pid: int
    hook_pid: int
    kind: str
    last: tuple[str, str]
    maker: str
    program: str
    indexes: Mapping[str, int]
    kinds: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def _shim(node: Node) -> Iterator[ProcessShim]:
    shim = ProcessShim(SANDBOX, node.dirs.bundles)
    try:
        yield shim
    finally:
        shim.stop()


@contextlib.contextmanager
def _firecracker(node: Node) -> Iterator[Started]:
    """Go's runtime before 3.32: its jailer is dead, and its id cut."""
    argv = ("/firecracker", "--id", CUT, "--start-time-us", "1", "--config-file", "/fcConfig.json")
    jail = node.dirs.vc / "firecracker" / CUT / "root"
    vcpus = {"fc_vcpu 0": 0, "fc_vcpu 1": 1}
    spec = Spec(
        copy_of_python(node.root / "bin" / "firecracker"),
        argv,
        ("fc_api", *vcpus),
        kvm_ids=vcpus,
        jail=str(jail),
        daemonized=True,
    )
    with _shim(node) as shim:
        jailer = shim.spawn(spec.command)
        pid = wait_for(lambda: jailed_pid(spec), "the pid file")
        try:
            wait_for(lambda: spec.is_ready(pid), "the VMM")
            others = {"fc_api": "emulator", "kvm-nx-lpage-re": "kvm"}
            last = ("fc_vcpu 0", "fc_vcpu 1")
            yield Started(pid, jailer, "firecracker", last, "firecracker", "", vcpus, others)
        finally:
            os.kill(pid, 9)


@contextlib.contextmanager
def _cloud_hypervisor(
    node: Node, folder: str = "", prefix: tuple[str, ...] = ()
) -> Iterator[Started]:
    """Its VM is made by the thread `vmm`, and KVM's ids are APIC ids with a gap."""
    program = copy_of_python(node.root / "bin" / "cloud-hypervisor")
    api = f"{folder}/{SANDBOX}/ch-api.sock" if folder else _go_api(node)
    vcpus = {f"vcpu{n}": n for n in range(5)}
    devices = ("_disk0_q0", "clh_drive_3_q0")
    others = ("http-server", "vmm_signal_hand", "__rng", "_vsock1", "__balloon")
    spec = Spec(
        program,
        (program, "--api-socket", api),
        ("vmm", *others, *vcpus, *devices),
        maker="vmm",
        kvm_ids=dict(zip(vcpus, (0, 1, 2, 4, 5), strict=True)),
    )
    with _shim(node) as shim:
        pid = shim.spawn([*prefix, *spec.command])
        wait_for(lambda: spec.is_ready(pid), "the VMM")
        kinds = dict.fromkeys(devices, "iothread") | dict.fromkeys(("vmm", *others), "emulator")
        last = ("vcpu3", "vcpu4")
        yield Started(pid, pid, "cloud-hypervisor", last, "vmm", program, vcpus, kinds)


def _go_api(node: Node) -> str:
    return str(node.dirs.vc / "vm" / SANDBOX / "clh-api.sock")


def _cloud_hypervisor_of_rs(node: Node) -> contextlib.AbstractContextManager[Started]:
    """runtime-rs has its socket in the sandbox's own folder."""
    return _cloud_hypervisor(node, str(node.dirs.kata))


@contextlib.contextmanager
def _rootless_cloud_hypervisor(node: Node) -> Iterator[Started]:
    """runtime-rs runs it as a user made for it, with folders of that user."""
    opens_kvm = ("--inh-caps=+dac_override", "--ambient-caps=+dac_override")  # in place of a group
    prefix = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *opens_kvm)
    node.root.chmod(0o755)  # it has the program
    with _cloud_hypervisor(node, f"/run/user/{USER}/run/kata", prefix) as started:
        assert os.stat(f"/proc/{started.pid}").st_uid == USER
        yield started


@contextlib.contextmanager
def _openvmm(node: Node) -> Iterator[Started]:
    """runtime-rs starts it; what it is told beside its socket comes over that."""
    program = copy_of_python(node.root / "bin" / "openvmm")
    vcpus = {"vp-0": 0, "vp-1": 1}
    argv = (program, "--ttrpc", str(node.dirs.kata / SANDBOX / "openvmm.sock"))
    spec = Spec(program, argv, ("io-uring", *vcpus), maker="io-uring", kvm_ids=vcpus)
    with _shim(node) as shim:
        pid = shim.spawn(spec.command)
        wait_for(lambda: spec.is_ready(pid), "the VMM")
        kinds = {"io-uring": "emulator", "openvmm": "emulator"}
        yield Started(pid, pid, "openvmm", ("vp-0", "vp-1"), "io-uring", program, vcpus, kinds)


@contextlib.contextmanager
def _dragonball(node: Node) -> Iterator[Started]:
    """The shim itself: hooks report the thread that made the VM, and no file has its pid."""
    program = copy_of_python(node.root / "bin" / "containerd-shim-kata-v2")
    vcpus = {"db_vcpu0": 0, "db_vcpu1": 1}
    argv = (
        *(program, "-namespace", "k8s.io", "-address", "/run/containerd/containerd.sock"),
        *("-publish-binary", "/usr/bin/containerd", "-id", SANDBOX),
    )
    workers = ("tokio-rt-worker", "PreallocThread")  # the shim's own, and the VMM's without a name
    threads = (*workers, "vmm_master", *vcpus, "blk_iothread_q0")
    with vmm_standin.running(
        Spec(program, argv, threads, maker="vmm_master", kvm_ids=vcpus)
    ) as pid:
        kinds = {
            "containerd-shim": "emulator",
            **dict.fromkeys(workers, "emulator"),
            "vmm_master": "emulator",
            "blk_iothread_q0": "iothread",
        }
        last = ("db_vcpu0", "db_vcpu1")
        master = _tids(pid)["vmm_master"]
        yield Started(pid, master, "dragonball", last, "vmm_master", program, vcpus, kinds)


@contextlib.contextmanager
def _real_firecracker(node: Node) -> Iterator[Started]:
    with real_vmms.jailed_firecracker(node.dirs.vc, CUT) as (pid, jailer):
        vcpus = {"fc_vcpu 0": 0, "fc_vcpu 1": 1}
        last = ("fc_vcpu 0", "fc_vcpu 1")
        kinds = {"fc_api": "emulator"}
        yield Started(pid, jailer, "firecracker", last, "firecracker", "", vcpus, kinds)


@contextlib.contextmanager
def _real_cloud_hypervisor(node: Node) -> Iterator[Started]:
    with real_vmms.cloud_hypervisor(node.dirs.vc, SANDBOX) as (pid, path):
        vcpus = {f"vcpu{n}": n for n in range(5)}
        kinds = dict.fromkeys(("vmm", "http-server", "vmm_signal_hand"), "emulator")
        last = ("vcpu3", "vcpu4")
        yield Started(pid, pid, "cloud-hypervisor", last, "vmm", str(path), vcpus, kinds)


def _tids(pid: int) -> dict[str, int]:
    """Return a process's threads by name."""
    comms = Path(f"/proc/{pid}/task").glob("*/comm")
    return {path.read_text().strip(): int(path.parent.name) for path in comms}


def _shown(node: Node) -> list[dict[str, Any]]:
    return [one for one in node.ask("state")["sandboxes"] if one["id"].startswith(CUT)]


def _sandbox(node: Node) -> dict[str, Any]:
    """Return what is shown of the one sandbox whose id begins as ours does."""
    shown = _shown(node)
    assert [one["id"] for one in shown] == [SANDBOX]
    found: dict[str, Any] = shown[0]
    return found


STARTS: Mapping[str, Callable[[Node], contextlib.AbstractContextManager[Started]]] = {
    "firecracker": _firecracker,
    "cloud-hypervisor": _cloud_hypervisor,
    "openvmm": _openvmm,
    "dragonball": _dragonball,
    "cloud-hypervisor, runtime-rs": _cloud_hypervisor_of_rs,
    "cloud-hypervisor, rootless": _rootless_cloud_hypervisor,
    "firecracker, real": _real_firecracker,
    "cloud-hypervisor, real": _real_cloud_hypervisor,
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_found_and_pinned(
    start: Callable[[Node], contextlib.AbstractContextManager[Started]],
) -> None:
    """Its vCPUs are known by KVM's debugfs, whoever made the VM; each is on its own pCPU."""
    if accelerator() is not Accelerator.KVM:
        pytest.skip("KVM does not work here")
    first, second = two_cpus()
    with private_node() as node, private_debugfs(node.root / "debug"), start(node) as vmm:
        node.configure(hypervisors=[vmm.program] if vmm.program else [])
        pod = Pod(node, KataSandbox(node.dirs, SANDBOX))
        pod.kata.pid = vmm.hook_pid
        assert_unprivileged(node.start().pid)
        pod.write_bundle(SANDBOX, kind="sandbox")
        pod.persist(SANDBOX, None)
        node.hook("createRuntime", SANDBOX, vmm.hook_pid)
        pod.create("c1", f"{first},{second}", exclusive=True)

        def pinned() -> bool:
            tids = _tids(vmm.pid)
            return [os.sched_getaffinity(tids[name]) for name in vmm.last] == [{first}, {second}]

        wait_for(pinned, "pins")
        shown = _sandbox(node)
        assert (shown["vmm"]["kind"], shown["vmm"]["pid"]) == (vmm.kind, vmm.pid)
        rows = [one for one in shown["threads"] if one["tgid"] == vmm.pid]
        tasks = {int(tid) for tid in os.listdir(f"/proc/{vmm.pid}/task")}
        assert {one["tid"] for one in rows} == tasks, "each thread has a role, and a row has one"
        threads = {one["comm"]: one for one in rows}
        for name, index in vmm.indexes.items():
            assert (threads[name]["role"], threads[name]["vcpu"]) == ("vcpu", index), name
            assert threads[name]["source"] == "debugfs", name
        assert {name: threads[name]["role"] for name in vmm.kinds} == vmm.kinds
        folders = {path.name.partition("-")[0] for path in (node.root / "debug/kvm").iterdir()}
        assert str(_tids(vmm.pid)[vmm.maker]) in folders, "KVM's folder has the maker's name"
        assert not any(one["conflict"] for one in threads.values())
        text = node.cli("show", SANDBOX[:40]).stdout
        assert f"vCPUs {len(vmm.indexes)} now" in text
        assert "at boot" not in text + node.cli("map", SANDBOX[:40]).stdout.replace(
            "number of vCPUs at boot unknown", ""
        )
        if vmm.kind == "dragonball":
            assert "shim" not in {one["role"] for one in shown["threads"]}
            assert threads["tokio-rt-worker"]["desired"] is not None, "it is not left alone"


def test_a_jailed_vm_is_found_by_its_exec() -> None:
    """Before any hook and any file of Kata: under the whole id, which its shim has.

    The process has Firecracker's arguments from its exec on, and is stopped there.
    """
    with private_node() as node, _shim(node):
        node.start()
        jail = node.dirs.vc / "firecracker" / CUT / "root"
        argv = ("/firecracker", "--id", CUT, "--start-time-us", "1")
        enter = partial(enter_jail, jail, [("/usr/bin/true", "firecracker")])
        pid = stopped.start(argv, executable="/firecracker", before=enter)
        try:
            wait_for(lambda: SANDBOX in {one["id"] for one in _shown(node)}, "the sandbox")
            wait_for(lambda: _sandbox(node)["vmm"], "its VMM")
            assert _sandbox(node)["vmm"]["pid"] == pid
        finally:
            stopped.end([pid])
