"""Pods through containerd's CRI and its runc shim, with minikata in Kata's place and our hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.criruntime import HOLD, CriNode, kata_handler, qemu_pid
from tests.e2e.node import Node
from tests.e2e.nodepods import VmThreads
from tests.e2e.unit import Unit

pytestmark = pytest.mark.usefixtures("kvm", "untouched")

ONE_CPU: Final[dict[str, Any]] = {"cpu_quota": 100_000, "cpu_period": 100_000}
SHARES: Final = {"cpu_shares": 102}


@pytest.fixture(scope="module")
def unit(node: Node) -> Unit:
    """The installed unit."""
    return Unit(node)


@pytest.fixture(scope="module")
def containerd(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CriNode]:
    """containerd with minikata as the handler `kata`."""
    with kata_handler(node, tmp_path_factory.mktemp("cri")) as made:
        yield made


@pytest.fixture(autouse=True)
def frequent_audits(unit: Unit) -> Iterator[None]:
    """Kata's state is looked at every few seconds: containerd 1.6 has no NRI to tell of updates."""
    with unit.settings(audit={"affinity_s": 2, "deep_s": 5}):
        yield


@pytest.fixture
def pods(containerd: CriNode) -> Iterator[CriNode]:
    """Pods of one test; they live until a failure is diagnosed."""
    yield containerd
    containerd.remove_all()


def _wait_placed(
    node: Node, pod: str, pairs: Mapping[int, int], rest: set[int], seconds: float = 30
) -> None:
    """Wait until every thread of the pod's VM is where it should be, as the kernel tells."""
    lines: list[str] = []

    def right() -> bool:
        lines[:] = VmThreads(qemu_pid(pod)).misplaced(pairs, rest)
        return not lines

    try:
        node.wait(right, f"pins of {pod[:12]}", seconds)
    except AssertionError as error:
        error.add_note("\n".join(lines))
        raise


def _containers(unit: Unit, pod: str) -> dict[str, dict[str, Any]]:
    """Return what the daemon knows of a pod's containers, by their name."""
    return {one["name"]: one for one in unit.sandbox(pod).get("containers", [])}


def _state(unit: Unit, pod: str, name: str) -> str:
    return str(_containers(unit, pod).get(name, {}).get("state", ""))


def test_pod_through_its_life(node: Node, unit: Unit, pods: CriNode) -> None:
    """Created, updated, stopped, removed: pins are right at each step, as the kernel tells."""
    pod = pods.run_pod("life")
    app = pods.create(pod, "life", "app", cpuset_cpus="4", **ONE_CPU)
    _wait_placed(node, pod, {15: 4}, {4})
    log = pods.create(pod, "life", "log", cpuset_cpus="6-7", **SHARES)
    _wait_placed(node, pod, {15: 4}, {6, 7})
    shown = unit.sandbox(pod)
    # containerd 1.6 tells nobody which handler runs a pod; NRI does, and 1.7's annotations.
    assert (shown["pod"], shown["handler"]) == ("shop/life", "kata" if node.nri else "")
    assert shown["vmm"]["orphan"] is False
    assert _containers(unit, pod)["app"]["exclusive"] == "4"

    pods.cri.update(app, cpuset_cpus="5")
    assert _written_cpuset(pod) == "5-7"
    _wait_placed(node, pod, {15: 5}, {6, 7})
    pods.cri.update(log, cpuset_cpus="8-9")
    _wait_placed(node, pod, {15: 5}, {8, 9})

    pods.cri.stop(log)
    pods.cri.remove(log)
    node.wait(lambda: _state(unit, pod, "log") == "deleted", "log deleted")
    _wait_placed(node, pod, {15: 5}, {5})
    pods.cri.stop_pod(pod)
    pods.cri.remove_pod(pod)
    node.wait(lambda: not unit.sandbox(pod), "the sandbox forgotten", seconds=60)


def _written_cpuset(pod: str) -> str:
    [file] = Path("/sys/fs/cgroup").rglob(f"kata_{pod}/cpuset.cpus")
    return file.read_text().strip()


def test_hooks_of_the_base_spec_alone(node: Node, unit: Unit, pods: CriNode) -> None:
    """Without NRI and audits: createRuntime, poststart and poststop each tell, in their phases.

    Pins stand while createRuntime has not ended: before the workload runs.
    """
    quiet = {"affinity_s": 3600, "deep_s": 86400}
    with unit.restarted_with(nri={"enabled": "no"}, audit=quiet), ThreadPoolExecutor(1) as pool:
        pod = pods.run_pod("hooks")
        app = pods.cri.create(pod, "app", pod_name="hooks", cpuset_cpus="10", **ONE_CPU)
        HOLD.touch()
        starting = pool.submit(pods.cri.start, app)
        try:
            _wait_told_by(node, unit, pod, "createRuntime")
            _wait_placed(node, pod, {15: 10}, {10})
            assert not starting.done()
        finally:
            HOLD.unlink()
        starting.result()
        _wait_told_by(node, unit, pod, "poststart")
        pods.cri.stop(app)
        pods.cri.remove(app)
        _wait_told_by(node, unit, pod, "poststop")


def _wait_told_by(node: Node, unit: Unit, pod: str, phase: str) -> None:
    """Wait until a hook of that phase told of the container; one in a hurry uses the spool."""
    said = {f"hook:{phase}", f"spool:{phase}"}
    node.wait(lambda: _containers(unit, pod).get("app", {}).get("source") in said, phase)


def test_containerd_restarts_under_running_pods(node: Node, unit: Unit, pods: CriNode) -> None:
    """Pods outlive a restart of containerd, their pins stay, and work goes on as before."""
    pod = pods.run_pod("stays")
    pods.create(pod, "stays", "app", cpuset_cpus="11", **ONE_CPU)
    log = pods.create(pod, "stays", "log", cpuset_cpus="12-13", **SHARES)
    _wait_placed(node, pod, {15: 11}, {12, 13})
    threads = VmThreads(qemu_pid(pod))
    pods.restart()
    assert threads.misplaced({15: 11}, {12, 13}) == []
    pods.create(pod, "stays", "more", cpuset_cpus="14", **ONE_CPU)
    _wait_placed(node, pod, {14: 14, 15: 11}, {12, 13})
    pods.cri.update(log, cpuset_cpus="8-9")
    _wait_placed(node, pod, {14: 14, 15: 11}, {8, 9})
    assert unit.sandbox(pod)["state"] == "ok"


def test_containers_of_another_handler_are_left_alone(
    node: Node, unit: Unit, pods: CriNode
) -> None:
    """A runc pod beside Kata's is no sandbox of ours: shown nowhere, moved by nobody."""
    kata = pods.run_pod("beside")
    pods.create(kata, "beside", "app", cpuset_cpus="4", **ONE_CPU)
    runc = pods.run_pod("plain", handler="runc")
    pods.create(runc, "plain", "app", cpuset_cpus="4-5", **SHARES)
    _wait_placed(node, kata, {15: 4}, {4})
    node.wait(lambda: runc not in {one["id"] for one in unit.state()["sandboxes"]}, "not ours")
    assert {one["id"] for one in unit.state()["sandboxes"]} == {kata}
