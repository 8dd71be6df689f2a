"""Every role found and pinned: no thread names, a held QMP socket, real KVM vCPU threads.

The truth is what QEMU answers to the shim that holds its socket. Each source of roles is proven
alone by taking the others away: debugfs by looking elsewhere, the descriptor map by giving up
CAP_SYS_PTRACE, creation order by vCPUs that were plugged later.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from kata_pin.base.placement import Report
from kata_pin.base.steps import finish
from kata_pin.base.values import RoleSource, ThreadRole
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.records.containers import Registry
from kata_pin.records.pins import Pins
from kata_pin.service.configuration import from_text
from kata_pin.service.options import Core, compose
from kata_pin.service.runtime_dir import boot_id
from tests.e2e.katapods import VHOST_WORKERS, LabPod, Pods
from tests.e2e.node import Node
from tests.support.daemon import Json
from tests.support.daemon import Node as PrivateNode
from tests.support.qemu import Machine
from tests.support.waiting import wait_for

CAP_SYS_PTRACE: Final = 19
_CAPABILITY_VERSION_3: Final = 0x20080522
NOWHERE: Final = "/nonexistent"
REAL: Final = "/sys/kernel/debug"

pytestmark = pytest.mark.usefixtures("kvm", "untouched")


@pytest.fixture
def daemon_sets_nothing(configure: Callable[..., None]) -> None:
    """The module's daemon sees a sandbox's state appear, and would pin by every source it has."""
    configure(mode="observe")


def test_every_role_is_found_and_pinned_with_qmp_held(
    node: Node, pinner: PrivateNode, start_pod: Pods
) -> None:
    """vCPUs, iothread, emulator, vhost, virtiofsd and KVM's helpers: named, and where they belong.

    Nobody but the shim is ever connected to QMP, and no thread has a name that tells anything.
    """
    pod = start_pod(virtiofsd=True)
    assert {_comm(pod.kata.pid, tid) for tid in _user_tids(pod)} == {"qemu-system-x86"}
    pod.write_bundle(pod.id, kind="sandbox")
    assert pinner.hook("createRuntime", pod.id, pod.kata.pid).stderr == ""
    assert pod.create("c1", "4,5", exclusive=True).stderr == ""
    assert pod.create("c2", "6,7").stderr == ""
    assert _qmp_clients(pod) == 1
    pod.wait_placed({6, 7}, {0: 4, 1: 5})
    shown = pinner.wait_state("p1", "ok")
    threads = pod.shown()
    truth = {tid: index for index, tid in pod.kata.vcpus().items()}
    found = {tid: one["vcpu"] for tid, one in threads.items() if one["role"] == "vcpu"}
    assert found == truth
    assert _vcpu_sources(pod) == {"debugfs"}
    roles = Counter(one["role"] for one in threads.values())
    assert roles["vhost"] == VHOST_WORKERS
    assert roles["iothread"] == 1
    assert roles["virtiofsd"] >= 1
    assert roles["kvm"] >= 1
    assert {tid for tid, one in threads.items() if one["role"] == "vhost"} == set(pod.workers)
    for name, tid in pod.kata.iothreads().items():
        assert (threads[tid]["role"], threads[tid]["iothread"]) == ("iothread", name)
    assert set(pod.kata.tids()) <= set(threads)
    assert shown["vmm"]["orphan"] is False
    assert _qmp_clients(pod) == 1


@pytest.mark.usefixtures("daemon_sets_nothing")
@pytest.mark.parametrize(
    ("debugfs", "ptrace", "source"),
    [(REAL, False, RoleSource.DEBUGFS), (NOWHERE, True, RoleSource.KVM_FD)],
    ids=["debugfs", "kvm-fd"],
)
def test_source_alone_names_hotplugged_vcpus_too(
    pinner: PrivateNode, start_pod: Pods, debugfs: str, ptrace: bool, source: RoleSource
) -> None:
    """With the other sources taken away this one names boot and hotplugged vCPUs, and they are set.

    Creation order says nothing of plugged vCPUs; it is another source for those of the start.
    """
    pod = _unannounced(start_pod)
    pod.kata.shim.plug(2)
    seen = _pass_of_its_own(pinner, pod, debugfs=debugfs, ptrace=ptrace)
    assert seen["vcpus"] == {str(tid): index for index, tid in pod.kata.vcpus().items()}
    assert set(seen["sources"]) == {source}
    assert seen["conflicts"] == 0
    assert pod.misplaced({6, 7}, {14: 4, 15: 5}) == []


@pytest.mark.usefixtures("daemon_sets_nothing")
def test_creation_order_alone_names_boot_vcpus(pinner: PrivateNode, start_pod: Pods) -> None:
    """Without debugfs and descriptors the order of creation names the vCPUs of the start."""
    pod = _unannounced(start_pod)
    seen = _pass_of_its_own(pinner, pod, debugfs=NOWHERE, ptrace=False)
    assert seen["vcpus"] == {str(tid): index for index, tid in pod.kata.vcpus().items()}
    assert set(seen["sources"]) == {RoleSource.ORDER}


@pytest.mark.usefixtures("daemon_sets_nothing")
def test_with_every_source_gone_nothing_is_guessed(pinner: PrivateNode, start_pod: Pods) -> None:
    """With nothing left to tell plugged vCPUs, none is paired: all may be vCPUs, on the mask."""
    pod = _unannounced(start_pod)
    pod.kata.shim.plug(2)
    seen = _pass_of_its_own(pinner, pod, debugfs=NOWHERE, ptrace=False)
    assert seen["vcpus"] == {}
    assert seen["conflicts"] >= len(pod.kata.vcpus())
    everywhere = {4, 5, 6, 7}
    assert {frozenset(os.sched_getaffinity(t)) for t in pod.kata.vcpus().values()} == {
        frozenset(everywhere)
    }


def test_vcpus_are_named_by_the_kernel_once_they_ran(pinner: PrivateNode, start_pod: Pods) -> None:
    """A VM started with -S has vCPU threads that KVM does not know: first by order, then by KVM."""
    pod = start_pod(machine=Machine(maximum=16, paused=True))
    pod.create("c1", "4,5", exclusive=True)
    pod.create("c2", "6,7")
    pod.wait_placed({6, 7}, {0: 4, 1: 5})
    assert _vcpu_sources(pod) == {"order"}
    pod.kata.shim.execute("cont")

    def by_kvm() -> bool:
        pinner.ask("pin", sandbox=pod.id)  # no event tells that a vCPU ran for the first time
        return _vcpu_sources(pod) == {"debugfs"}

    wait_for(by_kvm, "debugfs to name the vCPUs that run")
    assert pod.misplaced({6, 7}, {0: 4, 1: 5}) == []


def _vcpu_sources(pod: LabPod) -> set[str]:
    return {one["source"] for one in pod.shown().values() if one["role"] == "vcpu"}


# ---- a pass of its own, with fewer sources -----------------------------------------------


def _unannounced(start_pod: Pods) -> LabPod:
    """Start a sandbox whose containers are known from Kata's state only, so QMP told nothing."""
    pod = start_pod()
    pod.persist("c1", "4,5", exclusive=True)
    pod.persist("c2", "6,7")
    return pod


def _pass_of_its_own(node: PrivateNode, pod: LabPod, *, debugfs: str, ptrace: bool) -> Json:
    """Run passes in a child process that may look at less; return what it found.

    A fork costs milliseconds where a start of Python costs seconds.
    """
    paths = {**node.settings["paths"], "debugfs": debugfs}
    settings = {**node.settings, "mode": "act", "paths": paths}

    def look() -> Json:
        registry = Registry(":memory:", boot_id=boot_id())
        Pins(registry).set_live_threads(live=True)  # else the main thread would keep the whole mask
        parts = compose(from_text(json.dumps(settings)), registry)
        asyncio.run(parts.survey.all())
        finish(parts.adoption.all())
        cache = SandboxCache()
        cache.vmm = asyncio.run(parts.engine.find(pod.id, registry.containers(pod.id), cache))
        assert cache.vmm is not None
        if not ptrace:
            _give_up(CAP_SYS_PTRACE)
        return _told(_settled(parts, registry, pod.id, cache))

    return _in_a_child(look)


def _settled(parts: Core, registry: Registry, sandbox_id: str, cache: SandboxCache) -> Report:
    """Run passes until no thread is too young to tell what it is."""

    def look() -> Report | None:
        report = finish(
            parts.engine.steps(sandbox_id, registry.containers(sandbox_id), cache, act=True)
        )
        return None if cache.unsure else report

    return wait_for(look, "a pass over threads that are not young")


def _told(report: Report) -> Json:
    vcpus = [one for one in report.threads if one.role.role is ThreadRole.VCPU]
    return {
        "vcpus": {one.key.tid: one.role.vcpu for one in vcpus},
        "sources": [one.role.source for one in vcpus],
        "conflicts": sum(bool(one.role.conflict) for one in report.threads),
    }


def _in_a_child(work: Callable[[], Json]) -> Json:
    """Return what `work` returns in a forked process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writing, json.dumps(work()).encode())
            status = 0
        except BaseException as error:  # the parent is told, whatever it is
            os.write(writing, json.dumps({"error": repr(error)}).encode())
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told: Json = json.loads(pipe.read())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, told
    return told


def _give_up(capability: int) -> None:
    """Drop a capability from this process for good (capset(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    assert libc.capget(header, data) == 0
    words = list(struct.unpack("6I", data.raw))
    for number in range(3):
        words[number] &= ~(1 << capability)
    assert libc.capset(header, struct.pack("6I", *words)) == 0, os.strerror(ctypes.get_errno())


# ---- the machine -------------------------------------------------------------------------


def _user_tids(pod: LabPod) -> list[int]:
    """Return QEMU's own threads, without the kernel's workers among them (PF_USER_WORKER)."""
    found = []
    for tid in pod.kata.tids():
        with open(f"/proc/{pod.kata.pid}/task/{tid}/stat", encoding="ascii") as file:
            if not int(file.read().rpartition(") ")[2].split()[6]) & 0x4000:
                found.append(tid)
    return found


def _comm(pid: int, tid: int) -> str:
    return Path(f"/proc/{pid}/task/{tid}/comm").read_text().strip()


def _qmp_clients(pod: LabPod) -> int:
    """Return how many clients are connected to QMP, or wait to be."""
    with open("/proc/net/unix", encoding="ascii") as file:
        lines = [line.split() for line in file if str(pod.kata.qmp_path) in line]
    return sum(words[5] in {"02", "03"} for words in lines)
