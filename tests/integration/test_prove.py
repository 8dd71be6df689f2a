"""Measured isolation with the real kernel: perf's records, the scheduler's counters, a real VM."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.counters import CpuWindow, InterruptKind, Measured, RanTask
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import HostError
from kata_pin.base.values import Method, TaskClass, Verdict
from kata_pin.linux.files import HOST
from kata_pin.linux.interrupts import parse_interrupts
from kata_pin.linux.recording import Asked, measure
from kata_pin.linux.switches import SwitchRecorder
from kata_pin.linux.task_counters import task_runs
from kata_pin.linux.tracepoints import InterruptRecorder
from kata_pin.placement.owners import Known, Owner
from kata_pin.placement.proof import judge
from tests.support.alone import left_alone
from tests.support.daemon import PROGRAM, Json, Node, Pod
from tests.support.intruder import Busy, last_cpu
from tests.support.qemu import Accelerator, Machine, accelerator, busy_machine
from tests.support.switches import record_switches
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.alone, pytest.mark.root]

CPU = last_cpu()
WITHIN = 0.02


def ran(window: CpuWindow, tid: int) -> RanTask:
    return next(one for one in window.tasks if one.tid == tid)


def whole(measured: Measured) -> CpuWindow:
    """Return the window, in which nothing is missing and nothing counted twice.

    Some virtual machines hide tasks of their own from perf: where one follows on the other, who ran
    is not known for a moment.
    """
    window = measured.cpus[CPU]
    assert window.lost == 0
    assert window.unknown_ns < 0.001 * window.length_ns
    assert sum(one.ran_ns for one in window.tasks) + window.unknown_ns == window.length_ns
    return window


def undisturbed(attempt: Callable[[], tuple[Measured, int, int]]) -> tuple[Measured, int, int]:
    """Return the first attempt without a hidden task that ran for long, of five the last."""
    for _ in range(4):
        found = attempt()
        window = found[0].cpus[CPU]
        if window.unknown_ns < 0.001 * window.length_ns:
            return found
    return attempt()


@pytest.mark.parametrize("slice_s", [60.0, 0.002])
def test_a_known_intruder_ran_as_long_as_the_scheduler_counted(slice_s: float) -> None:
    """In one piece or in many slices, recorded time and counted time agree within 2 %."""

    def attempt() -> tuple[Measured, int, int]:
        with (
            Busy.started(CPU, "kp-intruder", fifo=50) as intruder,
            SwitchRecorder(HOST, CpuSet([CPU]), 20.0, ring_bytes=1 << 20) as recorder,
        ):
            intruder.begin(0.2, slice_s)
            done: list[int] = []
            waiting = threading.Thread(target=lambda: done.append(intruder.ended()))
            waiting.start()
            while not done:
                recorder.wait()
                recorder.drain()
            waiting.join()
            return recorder.end(), intruder.tid, done[0]

    measured, tid, counted = undisturbed(attempt)
    found = ran(whole(measured), tid)
    assert found.ran_ns == pytest.approx(counted, rel=WITHIN)
    assert (
        found.slices >= 0.9 * 0.2 / slice_s
    )  # two are one where nobody else wanted the CPU between
    task = measured.tasks[tid]
    assert (task.comm, str(task.affinity)) == ("kp-intruder", str(CPU))


EXECUTES = """
import os, sys, threading, time
def again():
    end = time.monotonic() + 0.01
    while time.monotonic() < end: pass
    os.execv(sys.executable, [sys.executable, "-IS", "-c", sys.argv[1], sys.argv[1]])
threading.Thread(target=again).start()
time.sleep(60)
"""
"""Runs, and starts itself again in another thread than its first one."""


def test_a_thread_that_executes_a_program_is_known() -> None:
    """It takes its process' id while it runs: nobody escapes under two names."""

    def attempt() -> tuple[Measured, int, int]:
        words = ["taskset", "-c", str(CPU), sys.executable, "-IS", "-c", EXECUTES, EXECUTES]
        with subprocess.Popen(words) as program:
            try:
                wait_for(lambda: os.sched_getaffinity(program.pid) == {CPU}, "the program there")
                return record_switches(HOST, CpuSet([CPU]), 1.0), program.pid, 0
            finally:
                program.kill()

    measured, pid, _ = undisturbed(attempt)
    assert ran(whole(measured), pid).slices > 5


def test_what_the_owner_waited_is_what_others_ran() -> None:
    """For a thread that is always ready: wait + run is the window, and its wait others' time."""

    def attempt() -> tuple[Measured, int, int]:
        with (
            Busy.started(CPU, "kp-owner") as owner,
            Busy.started(CPU, "kp-intruder") as intruder,
        ):
            owner.begin(60.0)
            time.sleep(0.1)
            before = task_runs(HOST, [(owner.tid, owner.tid)])[owner.tid]
            with SwitchRecorder(HOST, CpuSet([CPU]), 3.0, ring_bytes=1 << 20) as recorder:
                intruder.begin(0.5, 0.005)
                while recorder.left_s > 0:
                    recorder.wait()
                    recorder.drain()
                measured = recorder.end()
            after = task_runs(HOST, [(owner.tid, owner.tid)])[owner.tid]
            owners.append(owner.tid)
            return measured, after.waited_ns - before.waited_ns, after.ran_ns - before.ran_ns

    owners: list[int] = []
    measured, waited, ran_ns = undisturbed(attempt)
    window, owner = whole(measured), owners[-1]
    others = sum(one.ran_ns for one in window.tasks if one.tid != owner)
    slack = 0.01 * window.length_ns
    assert waited == pytest.approx(others, rel=WITHIN, abs=slack)
    assert ran(window, owner).ran_ns == pytest.approx(ran_ns, rel=WITHIN, abs=slack)


def test_alone_it_is_proved_and_with_an_intruder_violated() -> None:
    """Real-time tasks keep everybody else away: then only per-CPU kernel threads are seen."""
    with Busy.started(CPU, "kp-owner", fifo=50) as process:
        owner = Owner(CPU, "p1", "shop/web", own={process.tid: "vcpu 0"})
        process.begin(0.6)
        time.sleep(0.05)
        alone = record_switches(HOST, CpuSet([CPU]), 0.3, ring_bytes=1 << 20)
        process.ended()
        found = judge(alone, owner, Known(), 0.0)
        assert found.verdict is Verdict.PROVED, found
        assert set(found.ran_ns) <= {TaskClass.OWN, TaskClass.PER_CPU_KERNEL}
        with Busy.started(CPU, "kp-intruder", fifo=60) as intruder:
            time.sleep(0.5)
            process.begin(0.6)
            time.sleep(0.05)
            with SwitchRecorder(HOST, CpuSet([CPU]), 0.3, ring_bytes=1 << 20) as recorder:
                intruder.begin(0.05, 0.005)
                while recorder.left_s > 0:
                    recorder.wait()
                    recorder.drain()
                disturbed = recorder.end()
            counted = intruder.ended()
    found = judge(disturbed, owner, Known(), 0.0)
    assert found.verdict is Verdict.VIOLATED
    assert found.classes[intruder.tid] is TaskClass.USER
    assert found.foreign_ns == pytest.approx(counted, rel=WITHIN)


@pytest.fixture
def busy_guest(tmp_path: Path) -> Machine:
    return busy_machine(tmp_path)


@contextlib.contextmanager
def owned(node: Node, machine: Machine) -> Iterator[Pod]:
    """Run a pod that has our CPU exclusively."""
    with node.pod("p1", machine=machine) as pod:
        pod.announce()
        pod.create("c1", str(CPU), exclusive=True)
        pod.wait_placed({CPU})
        yield pod


@pytest.mark.qemu
def test_prove_names_the_intruder_of_a_vm(node: Node, busy_guest: Machine) -> None:
    """The command, with and without the daemon: violated, by whom, how long, and a remedy."""
    node.start()
    with (
        owned(node, busy_guest) as pod,
        Busy.started(CPU, "kp-intruder", fifo=50) as intruder,  # it runs within the window
    ):
        for running in (True, False):
            if not running:
                assert node.daemon is not None
                node.daemon.terminate()
            document, counted = prove(node, pod.id, intruder)
            (pcpu,) = document["pcpus"]
            assert document["daemon"]["running"] is running
            assert (document["verdict"], document["method"]) == ("violated", "perf")
            assert (pcpu["cpu"], pcpu["sandbox"]) == (CPU, pod.id)
            (task,) = [one for one in pcpu["tasks"] if one["tid"] == intruder.tid]
            assert (task["task_class"], task["comm"]) == ("user", "kp-intruder")
            assert task["total_ms"] * 1e6 == pytest.approx(counted, rel=WITHIN)
            assert task["command"]
            (vcpu,) = [one for one in pcpu["own"] if one["label"] == "vcpu 0"]
            assert vcpu["here_ms"] == pytest.approx(vcpu["ran_ms"], rel=0.05, abs=30)
            assert vcpu["waited_ms"] > 0.8 * task["total_ms"]


@pytest.mark.qemu
def test_prove_says_what_the_guest_feels_and_why(node: Node, busy_guest: Machine) -> None:
    """Steal time, the longest wait and exits, beside who ran there."""
    node.start()
    with (
        owned(node, busy_guest) as pod,
        Busy.started(CPU, "kp-intruder", fifo=50) as intruder,
    ):
        document, counted = prove(node, pod.id, intruder, "--guest")
        (guest,) = document["guests"]
        (vcpu,) = guest["vcpus"]
        (task,) = [one for one in document["pcpus"][0]["tasks"] if one["tid"] == intruder.tid]
        assert (vcpu["vcpu"], vcpu["cpus"], guest["sandbox"]) == ("vcpu 0", str(CPU), pod.id)
        assert counted / 1e6 * 0.8 < vcpu["steal_ms"]
        assert vcpu["preempted"] >= task["slices"]
        assert 0.9 * task["longest_ms"] <= vcpu["longest_wait_ms"] < 1000
        who = f"kp-intruder (pid {intruder.tid})"
        assert who in {one["who"] for one in vcpu["causes"]}
        if accelerator() is Accelerator.KVM:
            assert vcpu["exits"] is not None, guest["problems"]


def prove(node: Node, sandbox_id: str, intruder: Busy, *options: str) -> tuple[Json, int]:
    """Run the command, and the intruder once it measures; return both accounts."""
    command = [
        str(PROGRAM),
        "--config",
        str(node.config),
        "prove",
        sandbox_id,
        "--for",
        "4s",
        "--json",
        *options,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            wait_for(lambda: measures(running.pid), "the measurement to begin", 20)
            counted = intruder.run(0.3, 0.01)
            output, _ = running.communicate(timeout=20)
        finally:
            running.kill()
    assert running.returncode == 3
    return json.loads(output), counted


def measures(pid: int) -> bool:
    """Whether a process has events of perf open."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) == "anon_inode:[perf_event]":
                return True
    return False


@pytest.mark.qemu
def test_the_watch_names_an_intruder(node: Node, busy_guest: Machine) -> None:
    """Within one audit the daemon, which has no right of its own, says who disturbs a vCPU."""
    node.configure(audit={"affinity_s": 1.0, "deep_s": 3600})
    node.start()
    with (
        owned(node, busy_guest) as pod,
        Busy.started(CPU, "kp-intruder", fifo=60) as intruder,
    ):
        intruder.begin(60.0)

        def named() -> Json | None:
            rows = [one for one in node.ask("watch")["pcpus"] if one["sandbox"] == pod.id]
            tasks = rows[0]["window"]["tasks"] if rows and rows[0]["window"] else []
            return rows[0] if intruder.tid in {one["tid"] for one in tasks} else None

        row = wait_for(named, "the watch to name the intruder", 20)
        assert row["waited_percent"] > 1
        assert row["window"]["verdict"] == "violated"
        assert row["episode_s"] is not None
        time.sleep(3)
    about = foreign_events(node, pod.id)
    assert 1 <= sum("kp-intruder" in text for text in about) <= 2, "not at every audit"
    assert node.log.count("foreign tasks ran on exclusive pCPU") >= 1


@pytest.mark.qemu
def test_noise_hides_no_hog(node: Node, busy_guest: Machine) -> None:
    """While an episode of little noise lasts, a hog is recorded and logged; the end is, too."""
    node.configure(audit={"affinity_s": 1.0, "deep_s": 3600})
    node.start()
    with owned(node, busy_guest) as pod, Busy.started(CPU, "kp-noise") as noise:
        noise.begin(60.0, 0.002)
        wait_for(lambda: foreign_events(node, pod.id), "an episode of noise", 30)
        with Busy.started(CPU, "kp-hog", fifo=60) as hog:
            hog.begin(60.0)
            who = f"kp-hog (pid {hog.tid}"
            wait_for(lambda: who in "".join(foreign_events(node, pod.id)), "the hog's name", 30)
            assert who in node.log
        node.configure(audit={"affinity_s": 1.0, "deep_s": 3600}, isolation={"max_foreign": 100})
        assert node.daemon is not None
        node.daemon.reload()
        wait_for(lambda: "no longer run" in foreign_events(node, pod.id)[-1], "the end", 30)


NO_PERF = """
import ctypes, os, sys
library = ctypes.CDLL("libseccomp.so.2")
library.seccomp_init.restype = context = ctypes.c_void_p
filter = context(library.seccomp_init(0x7FFF0000))
call = library.seccomp_syscall_resolve_name(b"perf_event_open")
assert not library.seccomp_rule_add(filter, 0x00050000 | 13, call, 0)
assert not library.seccomp_load(filter)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a program that is refused perf events with EACCES, as by kernel.perf_event_paranoid=3."""


@pytest.mark.qemu
@pytest.mark.skipif(CPU == 0, reason="needs two CPUs")
def test_noise_hides_no_hog_where_perf_is_refused(node: Node, busy_guest: Machine) -> None:
    """The counters alone say how much more it is; a real-time vCPU keeps noise small."""
    node.configure(audit={"affinity_s": 1.0, "deep_s": 3600})
    node.start([sys.executable, "-c", NO_PERF])
    with owned(node, busy_guest) as pod, Busy.started(CPU, "kp-noise") as noise:
        pod.create("c2", "0")
        pod.wait_placed({0}, {len(pod.kata.vcpus()) - 1: CPU})

        def shares() -> list[float]:
            found = re.findall(
                r"others for ([0-9.]+) %, without", str(foreign_events(node, pod.id))
            )
            return [float(one) for one in found]

        with left_alone(max(pod.kata.vcpus().values())):
            noise.begin(60.0)
            wait_for(lambda: [one for one in shares() if one < 30], "little noise", 30)
            with Busy.started(CPU, "kp-hog", fifo=60) as hog:
                hog.begin(60.0)
                wait_for(lambda: max(shares()) > 70, "a share that is much larger", 30)


@pytest.mark.qemu
def test_the_other_owner_of_a_pcpu_is_not_to_be_pinned_again(
    node: Node, busy_guest: Machine
) -> None:
    """Two pods have it: neither log nor `check` has a command that changes nothing."""
    node.configure(audit={"affinity_s": 1.0, "deep_s": 3600}, isolation={"check_s": 1})
    node.start()
    with (
        node.pod("p1", machine=busy_guest) as first,
        node.pod("p2", machine=busy_guest) as second,
    ):
        for pod in (first, second):
            pod.announce()
            pod.create(f"c-{pod.id}", str(CPU), exclusive=True)
            pod.wait_placed({CPU})
        found = json.loads(node.cli("check", "--json").stdout)["findings"]
        tasks = [task for one in found if one["foreign"] for task in one["foreign"]["tasks"]]
        theirs = {one["command"] for one in tasks if one["task_class"] == "other-sandbox"}
        assert theirs
        assert theirs <= {f"kata-pin explain {pod.id}" for pod in (first, second)}


def foreign_events(node: Node, sandbox_id: str) -> list[str]:
    """Return what the history says of foreign tasks on a sandbox's pCPUs."""
    events = [one for one in node.ask("history")["events"] if one["kind"] == "foreign-tasks"]
    return [one["text"] for one in events if sandbox_id in one["text"]]


def test_interrupts_are_those_that_the_kernel_counts() -> None:
    """Ticks of a busy pCPU are those of /proc/interrupts; some virtual machines hide idle ones."""
    with (
        Busy.started(CPU, "kp-owner") as owner,
        InterruptRecorder(HOST, CpuSet([CPU])) as recorder,
    ):
        owner.begin(30.0)
        time.sleep(0.1)
        recorder.drain()
        before = interrupts()
        for _ in range(20):
            time.sleep(0.05)
            recorder.drain()
        after = interrupts()
        found, problem = recorder.end()
    assert (problem, found is None) == ("", False)
    ticks = next(one for one in found or () if one.name == "local_timer")
    assert 0.8 * (after - before) <= ticks.times <= 1.2 * (after - before) + 50
    assert 0 < ticks.longest_ns <= ticks.total_ns < 1_500_000_000


def interrupts() -> int:
    """Return how many ticks the kernel counted on our CPU."""
    found = parse_interrupts(Path("/proc/interrupts").read_bytes(), [CPU])
    return found[CPU][InterruptKind.TICK]


def test_methods_that_cannot_work_here_are_named() -> None:
    """Each better method that was refused is in the answer, with the reason."""
    with Busy.started(CPU, "kp-owner") as owner:
        owner.begin(30.0)
        time.sleep(0.05)
        asked = Asked(CpuSet([CPU]), 1.0, ((owner.tid, owner.tid),))
        refusals = {}
        for only in Method:
            try:
                assert measure(HOST, replace(asked, methods=(only,))).method is only
            except HostError as error:
                refusals[only] = str(error)
        found = measure(HOST, replace(asked, methods=(Method.HIST, Method.WAIT)))
    assert set(refusals) <= {Method.HIST, Method.SCHEDSTAT}
    assert all("kernel needs" in one for one in refusals.values())
    assert found.method in {Method.HIST, Method.WAIT}
    assert [method for method, _ in found.refused] == ["hist"] * (found.method is Method.WAIT)
    before, after = found.times[owner.tid]
    assert after.ran_ns > before.ran_ns
