"""A real kubelet with CPU manager `static`, containerd and minikata's VMs: who may run where.

Run by hand, `scripts/lab test trixie-kvm --with-kubelet -- tests/e2e/test_kubelet.py`, with one
kubelet for all tests, which build on each other in this order; then all again with the systemd
cgroup driver (`-k systemd` for these alone). Audits are off: events alone do it.

With the systemd driver nothing of Kata runs in the slice that the kubelet made for the pod, and
systemd takes the cpuset controller away from a slice in which nothing asks for it. The kubelet
counts that as no cgroup, and kills the pod's containers whenever it looks. A setting of all pods'
slices keeps the controller.

Out of scope: in-place resize, which needs an API server (tests/cluster/test_resize.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from kata_pin.base.cpuset import CpuSet
from tests.e2e.criruntime import kata_handler, qemu_pid
from tests.e2e.kubeletwatch import KubeletWatch, Sample
from tests.e2e.node import Node
from tests.e2e.nodepods import VmThreads
from tests.e2e.realkubelet import PROGRAM, RealKubelet, forget_state, uid_of
from tests.e2e.unit import Unit

pytestmark = [
    pytest.mark.skipif(not PROGRAM.exists(), reason="no kubelet: scripts/lab test --with-kubelet"),
    pytest.mark.usefixtures("kvm"),
    pytest.mark.timeout(1800),
]

POD_S: Final = 60.0
"""A pod takes 2 to 4 minutes in an emulated machine; multiplied by the scale."""

QUIET: Final = {"affinity_s": 3600, "deep_s": 86400}
TWO: Final = {"io.katacontainers.config.hypervisor.default_max_vcpus": "2"}
"""A container without a quota has the whole default set, by which Kata would size its VM."""

SLICES: Final = Path("/run/systemd/system/kubepods-.slice.d/kata-pin-e2e.conf")
"""A setting of the slices of all pods, and of their QoS classes."""

Tell = Callable[[str], None]


@dataclass
class Stage:
    """The running parts; `tell` prints a line of progress."""

    node: Node
    unit: Unit
    kubelet: RealKubelet
    watch: KubeletWatch
    tell: Tell

    def wait_running(self, pod: str) -> None:
        """Wait until a pod's container runs."""
        self.node.wait(lambda: self.kubelet.is_running(pod), f"pod {pod} to run", POD_S)
        self.tell(f"pod {pod} runs, sandbox {self.watch.sandbox(pod)[:12]}")

    def held(self, pod: str) -> CpuSet:
        """Return what a pod has exclusively, as the last look at the checkpoint says."""
        return self.watch.now.held.get(uid_of(pod), CpuSet())

    def wait_settled(self, *pods: str) -> None:
        """Wait until every thread is where the checkpoint says."""
        lines: list[str] = []

        def right() -> bool:
            lines[:] = [line for pod in pods for line in self._misplaced(pod)]
            return not lines

        try:
            self.node.wait(right, f"pins of {', '.join(pods)}", POD_S)
        except AssertionError as error:
            error.add_note("\n".join(lines))
            raise

    def _misplaced(self, pod: str) -> list[str]:
        """Return a line for each thread that is elsewhere; QEMU's cgroup has the pod's own CPUs."""
        now, own = self.watch.now, self.held(pod)
        if pod not in now.pods:
            return [f"{pod}: no VM"]
        pid = qemu_pid(self.watch.sandbox(pod))
        vm = VmThreads(pid)
        # Of 1 + 2 vCPUs the last two are paired, and have the highest indexes.
        pairs = dict(zip((14, 15), sorted(own), strict=True)) if own else {}
        lines = vm.misplaced(pairs, own or now.default)
        helpers = now.pods[pod].threads.keys() - vm.affinities().keys()
        for tid in helpers:
            mask = now.pods[pod].threads[tid]
            if mask != now.default:
                lines.append(f"helper {tid} on {mask}, not {now.default}")
        return [f"{pod}: {line}" for line in (lines if helpers else [*lines, "no virtiofsd"])]


@pytest.fixture(scope="module")
def tell(node: Node, request: pytest.FixtureRequest) -> Tell:
    """Print progress as it happens: the tests take half an hour."""
    began = time.monotonic()
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    assert isinstance(reporter, pytest.TerminalReporter)

    def say(text: str) -> None:
        line = f"{time.monotonic() - began:6.0f} s: {text}"
        reporter.write_line(f"\n  {line}")
        node.tell(line)

    return say


@pytest.fixture(scope="module", params=["cgroupfs", "systemd"])
def stage(
    node: Node, tmp_path_factory: pytest.TempPathFactory, tell: Tell, request: pytest.FixtureRequest
) -> Iterator[Stage]:
    """A kubelet that runs `a` (two exclusive CPUs) and `s` (shared), and everything below it.

    Our own allocator is configured all the time. The parameter is the kubelet's cgroup driver: of
    systemd's name for a pod Kata makes one folder of cgroups, above all slices.
    """
    unit, folder = Unit(node), tmp_path_factory.mktemp("kubelet")
    forget_state()
    alloc = {"policy": "static", "allow": [{"namespace": "*"}]}
    nri, audit = {"enabled": "yes"}, QUIET
    with (
        _cpuset_in_slices(node),
        kata_handler(node, folder, default=True) as containerd,
        unit.restarted_with(alloc=alloc, nri=nri, audit=audit, log_level="debug"),
        KubeletWatch() as watch,
    ):
        tell("containerd and kata-pin run")
        kubelet = RealKubelet(node, folder, request.param)
        kubelet.add("a", cpus=2)
        kubelet.add("s", annotations=TWO)
        try:
            with kubelet:
                kubelet.wait_serving()
                tell("the kubelet serves")
                yield Stage(node, unit, kubelet, watch, tell)
        finally:
            tell(f"{watch.looks} looks, {len(watch.samples)} different samples")
            containerd.pods.extend(watch.sandboxes)


@contextmanager
def _cpuset_in_slices(node: Node) -> Iterator[None]:
    """Have systemd leave the cpuset controller to pods' slices."""
    SLICES.parent.mkdir(parents=True, exist_ok=True)
    SLICES.write_text(f"[Slice]\nAllowedCPUs=0-{node.cpus - 1}\n")
    node.run(["systemctl", "daemon-reload"], seconds=60)
    try:
        yield
    finally:
        SLICES.unlink()
        node.run(["systemctl", "daemon-reload"], seconds=60)


def test_an_exclusive_and_a_shared_vm(stage: Stage) -> None:
    """As the checkpoint says: pairs inside the pod's CPUs, all else on the default set."""
    for pod in ("a", "s"):
        stage.wait_running(pod)
    assert (len(stage.held("a")), stage.held("s")) == (2, CpuSet())
    stage.wait_settled("a", "s")
    stage.tell(f"settled: a has {stage.held('a')}")


def test_our_own_allocator_stands_aside(stage: Stage) -> None:
    """The kubelet decides: no grant is made, and no container was refused or made twice."""
    allocation = stage.unit.state()["allocation"]
    assert "CPU manager policy is static" in allocation["suspended"]
    assert allocation["grants"] == []
    assert [stage.kubelet.restarts(pod) for pod in ("a", "s")] == [0, 0]


def test_a_new_exclusive_pod_has_its_cpus_at_once(stage: Stage) -> None:
    """All others leave them before the kubelet writes any cpuset.

    Of the new VM, which is born on all CPUs, every thread has left the others' exclusive ones while
    it is only starting: before its first container is made.
    """
    before = stage.watch.now
    mark = stage.watch.mark()
    stage.kubelet.add("b", cpus=2)
    stage.wait_running("b")
    samples = stage.watch.since(mark)
    new = next(one.held[uid_of("b")] for one in samples if uid_of("b") in one.held)
    given = [one for one in samples if uid_of("b") in one.held]
    _report(stage, given)

    free = next(one for one in given if not {"a", "s"} & one.trespassers().keys())
    stage.tell(f"others were off {new} after {free.began - given[0].began:.1f} s")
    assert free.pods["s"].cpuset == before.pods["s"].cpuset
    assert new <= CpuSet.parse(free.pods["s"].cpuset)
    after = given[given.index(free) :]
    assert [one.trespassers() for one in after if {"a", "s"} & one.trespassers().keys()] == []

    starting = [one for one in given if "b" in one.pods and not one.pods["b"].cpuset]
    assert starting, "no look at the VM while it was starting"
    later = given[given.index(starting[-1]) :]
    assert [one.trespassers() for one in later if "b" in one.trespassers()] == []

    stage.wait_settled("a", "b", "s")
    stage.tell(f"settled: a has {stage.held('a')}, b has {stage.held('b')}")


def _report(stage: Stage, samples: Sequence[Sample]) -> None:
    """Tell for how long threads of each pod were on others' CPUs."""
    spans: dict[str, dict[int, tuple[float, float]]] = {}
    for sample in samples:
        for pod, threads in sample.trespassers().items():
            of_pod = spans.setdefault(pod, {})
            for tid in threads:
                of_pod[tid] = of_pod.get(tid, (sample.began, 0.0))[0], sample.ended
    for pod, of_pod in spans.items():
        longest = max(last - first for first, last in of_pod.values())
        stage.tell(f"{len(of_pod)} threads of {pod} were seen on others' CPUs, {longest:.1f} s")


def test_restarts_change_nothing(stage: Stage) -> None:
    """kata-pin's daemon and the kubelet are killed and come back: no thread's mask changes."""
    stage.wait_settled("a", "b", "s")
    mark = stage.watch.mark()
    killed = stage.unit.pid
    os.kill(killed, signal.SIGKILL)
    stage.kubelet.kill()
    stage.kubelet.start()
    stage.unit.wait_running(other_than=killed)
    stage.tell("kata-pin runs again")
    stage.kubelet.wait_serving()
    for pod in ("a", "b", "s"):
        stage.wait_running(pod)
    stage.wait_settled("a", "b", "s")
    assert _moved(stage.watch.since(mark)) == []
    assert [stage.kubelet.restarts(pod) for pod in ("a", "b", "s")] == [0, 0, 0]


def _moved(samples: Sequence[Sample], *pods: str) -> list[str]:
    """Return a line per thread of the first sample, of these pods, that was elsewhere later."""
    first = samples[0]
    lines = {
        f"{name}: thread {tid} on {seen[tid]}, not {mask}"
        for sample in samples
        for name, pod in first.pods.items()
        if not pods or name in pods
        for seen in [sample.pods[name].threads if name in sample.pods else {}]
        for tid, mask in pod.threads.items()
        if tid in seen and seen[tid] != mask
    }
    return sorted(lines)


def test_a_pod_that_keeps_failing(stage: Stage) -> None:
    """Its command does not exist: each try has the same CPUs, and moves nobody."""
    stage.kubelet.add("f", cpus=2, command=["/nothing"])
    stage.node.wait(lambda: stage.kubelet.restarts("f") >= 1, "a second try", POD_S)
    stage.wait_settled("a", "b", "s")
    mark, before = stage.watch.mark(), stage.kubelet.restarts("f")
    held = stage.held("f")
    stage.tell(f"f has {held} and failed {before + 1} times")
    stage.node.wait(lambda: stage.kubelet.restarts("f") > before + 1, "two more tries", POD_S)
    samples = stage.watch.since(mark)
    assert len(held) == 2
    assert {one.held.get(uid_of("f")) for one in samples} == {held}
    assert _moved(samples, "a", "b", "s") == []
    assert [one.trespassers() for one in samples if one.trespassers()] == []


def test_what_a_pod_had_is_shared_when_it_has_ended(stage: Stage) -> None:
    """Two pods are removed: their CPUs are in the default set, shared threads use them again."""
    gone = stage.held("b") | stage.held("f")
    for pod in ("b", "f"):
        stage.kubelet.remove(pod)

    def ended() -> bool:
        now = stage.watch.now
        return gone <= now.default and not {"b", "f"} & now.pods.keys()

    stage.node.wait(ended, "the VMs to end", POD_S)
    stage.tell(f"{gone} are in the default set {stage.watch.now.default}")
    stage.wait_settled("a", "s")
    assert stage.watch.now.trespassers() == {}
    sandboxes = {one["id"] for one in stage.unit.state()["sandboxes"]}
    assert sandboxes == {stage.watch.sandbox(pod) for pod in ("a", "s")}
