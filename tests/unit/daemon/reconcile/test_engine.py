"""A pass over real processes, at moments that real hosts seldom show."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import pytest

from kata_pin.calls import DIRECT, Calls, DirectCalls
from kata_pin.daemon.reconcile.engine import MAX_ROUNDS, Engine
from kata_pin.daemon.reconcile.kata_pinning import KataPinningReader
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.daemon.reconcile.thread_finder import ThreadFinder
from kata_pin.daemon.reconcile.vmm_search import VmmSearch
from kata_pin.daemon.store.pins import Pins
from kata_pin.daemon.store.vmms import AcceptedVmms
from kata_pin.host.cgroup_owner import why_not_roots
from kata_pin.host.process import ProcessIndex, cgroups, exe_file, read_process
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node import Node
from kata_pin.model.pass_outcome import thread_state
from kata_pin.model.sandbox import Container, Vmm
from kata_pin.model.steps import finish
from kata_pin.model.thread import ProcessKey, ThreadKey, ThreadRole
from kata_pin.policy.alloc.allotment import Allotment, nothing_allotted
from kata_pin.sources.bundles import BundleReader
from kata_pin.vmm.find import VmmFinder
from kata_pin.vmm.host_access import HostAccess
from kata_pin.vmm.shims import Shims
from kata_pin.vmm.state_files import KataPaths
from tests.support import world
from tests.support.vmmhost import no_survey
from tests.support.world import flat


class PinStore:
    """What a registry would remember."""

    def __init__(self) -> None:
        self.masks: dict[ThreadRole, CpuSet] = {}

    def pairs(self, sandbox_id: str) -> dict[ThreadKey, int]:
        return {}

    def first_seen(self, sandbox_id: str) -> dict[ThreadRole, CpuSet]:
        return self.masks

    def keep(
        self,
        sandbox_id: str,
        *,
        pairs: Mapping[ThreadKey, int],
        first_seen: Mapping[ThreadRole, CpuSet],
    ) -> None:
        self.masks = dict(first_seen)


class VmmStore:
    """What a registry would know of VMMs accepted before: nothing."""

    def of(self, sandbox_id: str) -> None:
        return None

    def keep(self, sandbox_id: str, vmm: Vmm) -> None:
        pass


class Killer(DirectCalls):
    """The kernel's calls; a process ends when another's affinity has just been set."""

    def __init__(self, victim: subprocess.Popen[bytes], moment: int) -> None:
        self._victim = victim
        self._moment = moment

    def set_affinity(self, tid: int, cpus: Iterable[int]) -> None:
        os.sched_setaffinity(tid, cpus)
        if tid == self._moment:
            self._victim.kill()
            self._victim.wait()


class OneNode:
    """The node's facts, without looking."""

    cgroup_mounts = ()
    kubelet = None

    def current(self) -> Node:
        return world.node(flat(2))


class OneFinder:
    """Finds a given process whatever the sandbox."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def find(self, sandbox_id: str, hints: object = ()) -> Vmm:
        key: ProcessKey = read_process(HostRoot(), self._pid).key
        return Vmm("qemu", key, parent=os.getpid(), exe="qemu", witness="test", kvm=False)


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        try:
            yield process
        finally:
            process.kill()


def _engine(calls: Calls, vmm: int, virtiofsd: int) -> Engine:
    """Return an engine to which one child of ours is the VMM and another its virtiofsd."""
    root = HostRoot(debugfs="/nonexistent", calls=calls)
    index = ProcessIndex(root)
    programs = {virtiofsd: "/usr/libexec/virtiofsd"}
    host = HostAccess(
        root,
        index,
        partial(read_process, root),
        lambda pid: ["x", "--shared-dir=/run/pod/shared"] if pid == virtiofsd else ["x"],
        lambda pid: (programs.get(pid, "/bin/x"), False),
        partial(exe_file, root),
        partial(cgroups, root),
        partial(why_not_roots, root),
    )
    finder = cast("VmmFinder", OneFinder(vmm))
    paths = KataPaths("/nonexistent", "/nonexistent")
    pinning = KataPinningReader(root, paths, BundleReader([]), ())
    node = cast("NodeWatch", OneNode())
    threads = ThreadFinder(root, node, index, host, paths, Shims(host))
    search = VmmSearch(root, index, finder, cast("AcceptedVmms", VmmStore()), no_survey())
    return Engine(root, node, cast("Pins", PinStore()), index, threads, search, pinning)


@pytest.mark.root
def test_a_helper_that_exits_during_a_pass_is_not_the_vmm() -> None:
    """virtiofsd, the shim or a vhost worker may go at any moment; the sandbox lives on."""
    with sleeping() as virtiofsd, sleeping() as vmm:  # set in this order
        engine = _engine(Killer(virtiofsd, moment=vmm.pid), vmm.pid, virtiofsd.pid)
        cache = SandboxCache()
        report = engine.run("pod", (world.shared("app", "1"),), cache, act=True)
        assert virtiofsd.returncode is not None
        assert cache.vmm is not None, cache.problem
        assert vmm.pid in {thread.key.tgid for thread in report.threads}
        assert os.sched_getaffinity(vmm.pid) == {1}


class Refuser(DirectCalls):
    """Calls that set nothing."""

    def set_affinity(self, tid: int, cpus: Iterable[int]) -> None:
        raise OSError(errno.EINVAL, "refused")


@pytest.mark.parametrize(("most", "rounds"), [(100, MAX_ROUNDS), (0, 1)])
def test_a_crowd_of_threads_gets_one_round(
    most: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A VMM with more threads than are looked into holds the daemon for one look, not for five."""
    monkeypatch.setattr(f"{Engine.__module__}.MAX_THREADS", most)
    with sleeping() as vmm:
        engine = _engine(Refuser(), vmm.pid, 0)
        report = engine.run("pod", (world.shared("app", "1"),), SandboxCache(), act=True)
        assert (report.rounds, report.settled) == (rounds, False)


class HiddenCpuset(DirectCalls):
    """The kernel's calls under a cpuset that nobody can read: CPU 1 alone is ever granted."""

    def __init__(self) -> None:
        self.sets = 0

    def set_affinity(self, tid: int, cpus: Iterable[int]) -> None:
        self.sets += 1
        os.sched_setaffinity(tid, {1})


@pytest.mark.skipif(os.cpu_count() == 1, reason="needs two CPUs")
def test_what_the_kernel_narrows_is_set_once() -> None:
    """A thread that gets a part of its CPUs is neither drift nor set in every round and pass."""
    with sleeping() as vmm:
        os.sched_setaffinity(vmm.pid, {1})
        calls = HiddenCpuset()
        engine, cache = _engine(calls, vmm.pid, 0), SandboxCache()
        containers = (world.shared("app", "0-1"),)
        for _ in range(3):
            report = engine.run("pod", containers, cache, act=True)
            assert report.settled
            assert report.placement is not None
            assert (report.drifts, report.notes) == ((), ())
            (thread,) = report.threads
            desired = report.placement.desired[thread.key]
            assert thread_state(thread, desired, released=False) == "narrowed"
        assert calls.sets == 1
        cache.other_writers.forget()  # an event: the placement is asserted again
        engine.run("pod", containers, cache, act=True)
        engine.run("pod", containers, cache, act=True)
        assert calls.sets == 2


class OneRefusal(DirectCalls):
    """The kernel's calls, which refuse to move one thread while `errno` says so."""

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.errno = 0

    def set_affinity(self, tid: int, cpus: Iterable[int]) -> None:
        if self.errno and tid == self.tid:
            raise OSError(self.errno, "refused")
        os.sched_setaffinity(tid, cpus)


@pytest.mark.root
@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EPERM])
def test_a_refused_undo_is_tried_again(refusal: int) -> None:
    """What could not be restored is remembered: the next release restores it."""
    with sleeping() as vmm:
        before = os.sched_getaffinity(vmm.pid)
        calls = OneRefusal(vmm.pid)
        engine, cache = _engine(calls, vmm.pid, 0), SandboxCache()
        containers = (world.shared("app", "1"),)
        engine.run("pod", containers, cache, act=True)
        assert os.sched_getaffinity(vmm.pid) == {1}
        calls.errno = refusal
        assert not engine.run("pod", containers, cache, act=True, release=True).settled
        calls.errno = 0
        engine.run("pod", containers, cache, act=True, release=True)
        assert os.sched_getaffinity(vmm.pid) == before
        assert engine._pins.first_seen("pod") == {}


@pytest.mark.root
def test_an_undo_of_another_writers_thread_is_tried_again() -> None:
    """A thread that kata-pin backs off from is restored once the back-off is over."""
    with sleeping() as vmm:
        before = os.sched_getaffinity(vmm.pid)
        engine, cache = _engine(DIRECT, vmm.pid, 0), SandboxCache()
        containers = (world.shared("app", "1"),)
        (thread,) = engine.run("pod", containers, cache, act=True).threads
        for _ in range(3):
            cache.other_writers.drifted([thread.key], time.monotonic())
        engine.run("pod", containers, cache, act=True, release=True)
        cache.other_writers.forget()
        engine.run("pod", containers, cache, act=True, release=True)
        assert os.sched_getaffinity(vmm.pid) == before


def test_an_undo_that_missed_new_threads_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread born in the last round inherited a pin: what restores it is kept."""
    with sleeping() as vmm:
        engine, cache = _engine(DIRECT, vmm.pid, 0), SandboxCache()
        containers = (world.shared("app", "1"),)
        engine.run("pod", containers, cache, act=True)
        with monkeypatch.context() as patch:
            patch.setattr(ThreadFinder, "has_all", lambda *_: False)
            engine.run("pod", containers, cache, act=True, release=True)
        assert engine._pins.first_seen("pod")
        engine.run("pod", containers, cache, act=True, release=True)
        assert engine._pins.first_seen("pod") == {}


def test_foreseeing_changes_nothing() -> None:
    """Neither the cache, nor what is remembered, nor what the allocator decided."""
    with sleeping() as vmm:
        decided: list[str] = []

        def decide(containers: Sequence[Container]) -> Allotment:
            decided.extend(one.id for one in containers)
            return nothing_allotted(containers)

        engine = replace(_engine(DIRECT, vmm.pid, 0), _allot=decide)
        cache = SandboxCache()
        before = repr((cache, vars(cache.roles)))
        report = finish(engine.foresee("pod", (world.shared("app", "1"),), cache))
        assert report.placement is not None
        assert {one.applied for one in report.placement.desired.values()} == {CpuSet([1])}
        assert (repr((cache, vars(cache.roles))), decided) == (before, [])
        assert engine._pins.first_seen("pod") == {}


def test_threads_beyond_a_bound_are_left_out_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for one sandbox is bounded; the main thread is looked at in any case."""
    monkeypatch.setattr(f"{ThreadFinder.__module__}.MAX_READ", 3)
    code = "import threading\nfor _ in range(9):\n threading.Thread(target=input).start()\n"
    with subprocess.Popen(
        [sys.executable, "-c", code + "print(flush=True)"], stdin=-1, stdout=-1
    ) as vmm:
        assert vmm.stdout is not None
        vmm.stdout.readline()
        try:
            engine = _engine(DIRECT, vmm.pid, 0)
            report = engine.run("pod", (world.shared("app", "1"),), SandboxCache(), act=True)
        finally:
            vmm.kill()
    assert len(report.threads) == 3
    assert vmm.pid in {thread.key.tid for thread in report.threads}
    (note,) = [note for note in report.notes if note.code == "crowd"]
    assert note.text.startswith("too many threads: 7 threads not looked at")
