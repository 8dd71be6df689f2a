"""The other methods, on captured trees: histograms of tracefs, counters of pCPUs, waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kata_pin.base.counters import CpuRun, RanTask
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import HostError
from kata_pin.base.threads import TaskRun
from kata_pin.base.values import Method
from kata_pin.linux import recording, tracepoints
from kata_pin.linux.files import HostRoot
from kata_pin.linux.recording import Asked, count_others, measure
from kata_pin.linux.tracepoints import record_hists
from kata_pin.placement.owners import Owner
from kata_pin.placement.proof import judge_counts
from tests.support.hosttree import FakeCalls, grow

TOTALS = "\nTotals:\n    Hits: 9\n    Entries: 2\n    Dropped: {dropped}\n"
SWITCHES = """# event histogram
{{ common_cpu:          2, next_pid:          0 }} hitcount:          8
{{ common_cpu:          2, next_pid:         34 }} hitcount:          4
{{ common_cpu:          2, next_pid:         35 }} hitcount:          1
"""
TIMES = """# event histogram
{{ common_cpu:          2, pid:         34 }} hitcount:          4  runtime:     250000
{{ common_cpu:          2, pid:         36 }} hitcount:          9  runtime:    9000000
"""


class Denied(FakeCalls):
    """Calls of a kernel without perf."""

    def switches(self, cpu: int) -> int:
        raise PermissionError(13, "Permission denied")


def tree(root: Path, dropped: int = 0) -> HostRoot:
    totals = TOTALS.replace("{dropped}", str(dropped))
    event = "sys/kernel/tracing/instances/x/events/sched"
    grow(
        root,
        {
            "sys/devices/system/cpu/online": "0-3",
            "sys/kernel/tracing/events/header_page": "",
            f"{event}/sched_switch/trigger": "",
            f"{event}/sched_switch/hist": SWITCHES.format() + totals,
            f"{event}/sched_stat_runtime/trigger": "",
            f"{event}/sched_stat_runtime/hist": TIMES.format() + totals,
            "proc/34/stat": "34 (kworker/2:0) S 2 0 0 0 -1 69238880 0 " + "0 " * 40,
            "proc/34/status": "Name:\tkworker/2:0\nTgid:\t34\n",
            "proc/34/cgroup": "0::/",
            "proc/7/task/7/schedstat": "100 5 1",
            "proc/schedstat": "version 16\ntimestamp 1\ncpu2 0 0 0 0 0 0 777 5 12\n",
        },
    )
    calls = Denied()
    calls.affinities[34] = frozenset({2})
    return HostRoot(str(root), calls=calls)


@pytest.fixture(autouse=True)
def _instance(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def made(tracing: str) -> Iterator[str]:
        yield f"{tracing}/instances/x"

    monkeypatch.setattr(tracepoints, "_instance", made)


def test_histograms_say_who_and_how_long(tmp_path: Path) -> None:
    """How often a task came and how long it ran; who came once and ran no tick has no time."""
    progress: list[float] = []
    found = record_hists(tree(tmp_path), CpuSet([2]), 0.05, progress.append)
    window = found.cpus[2]
    assert found.method is Method.HIST
    assert window.tasks == (
        RanTask(34, 4, 250_000, 0),
        RanTask(35, 1, 0, 0),
        RanTask(36, 0, 9_000_000, 0),
    )
    assert (window.problem, window.records) == ("", 13)
    worker = found.tasks[34]
    assert (worker.comm, worker.bound) == ("kworker/2:0", True)
    assert found.tasks[35].comm == ""
    assert progress[-1] == 1
    event = tmp_path / "sys/kernel/tracing/instances/x/events/sched"
    assert (event / "sched_switch/trigger").read_text() == (
        "hist:keys=common_cpu,next_pid:size=8192 if CPU == 2"
    )


def test_what_had_no_room_or_was_offline_is_a_problem(tmp_path: Path) -> None:
    """A table that was full and a CPU that is offline prove nothing."""
    found = record_hists(tree(tmp_path, dropped=3), CpuSet([2, 9]), 0.05, lambda _: None)
    assert found.cpus[2].problem == "6 events had no room in the kernel's table"
    assert found.cpus[2].lost == 6
    event = tmp_path / "sys/kernel/tracing/instances/x/events/sched"
    assert " if CPU == 2 || CPU == 9" in (event / "sched_switch/trigger").read_text()
    whole = record_hists(tree(tmp_path), CpuSet([9]), 0.05, lambda _: None)
    assert whole.cpus[9].problem == "it is offline"


def test_counters_before_and_after(tmp_path: Path) -> None:
    """Those of the threads, and of the pCPU where that is asked for."""
    root, progress = tree(tmp_path), list[float]()
    found = count_others(root, CpuSet([2]), 0.5, [(7, 7), (8, 8)], progress.append, by_cpu=True)
    assert progress == sorted(progress)
    assert progress[-1] == 1
    assert found.times == {7: (TaskRun(100, 5, 1), TaskRun(100, 5, 1))}
    assert found.cpu_runs == {2: (CpuRun(777, 5, 12), CpuRun(777, 5, 12))}
    waits = count_others(root, CpuSet([2]), 0.01, [(7, 7)], lambda _: None, by_cpu=False)
    assert (waits.method, waits.cpu_runs) == (Method.WAIT, {})


def test_a_slice_between_two_readings_hides_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vCPU runs once while the counters are read first; somebody else once after that."""
    own, others, readings = 0, 0, 0

    def read() -> None:
        nonlocal own, readings
        readings += 1
        own += readings == 2

    def cpu_runs(*_: object) -> dict[int, CpuRun]:
        read()
        return {2: CpuRun(1000 * (own + others), 0, own + others)}

    def task_runs(*_: object) -> dict[int, TaskRun]:
        read()
        return {7: TaskRun(1000 * own, 0, own)}

    def slept(_: float) -> None:
        nonlocal others
        others = 1

    monkeypatch.setattr(recording, "cpu_runs", cpu_runs)
    monkeypatch.setattr(recording, "task_runs", task_runs)
    root = tree(tmp_path)
    found = count_others(root, CpuSet([2]), 0.01, [(7, 7)], slept, by_cpu=True)
    owner = Owner(2, "p1", "shop/web", own={7: "vcpu 0"}, alone=frozenset({7}))
    assert judge_counts(found, owner, 0.0).slices


def test_the_first_method_that_works(tmp_path: Path) -> None:
    """Each refusal is told; if none works, the first one is raised: it is the best method's."""
    mine = os.sched_getaffinity(0)
    root = tree(tmp_path)
    asked = Asked(CpuSet([2]), 0.02, ((7, 7),), free=CpuSet(mine))
    found = measure(root, asked)
    assert found.method is Method.HIST
    ((method, reason),) = found.refused
    assert (method, "Permission denied" in reason) == ("perf", True)
    (tmp_path / "sys/kernel/tracing/instances/x/events/sched/sched_switch/hist").unlink()
    found = measure(root, asked)
    assert [method for method, _ in found.refused] == ["perf", "hist"]
    assert found.method is Method.SCHEDSTAT
    (tmp_path / "proc/schedstat").unlink()
    assert measure(root, asked).method is Method.WAIT
    with pytest.raises(HostError, match="CONFIG_SCHEDSTATS"):
        measure(root, Asked(CpuSet([2]), 0.02, methods=(Method.SCHEDSTAT,), free=CpuSet(mine)))
    with pytest.raises(HostError, match="CAP_PERFMON"):
        measure(
            root, Asked(CpuSet([2]), 0.02, methods=(Method.PERF, Method.HIST), free=CpuSet(mine))
        )
