"""Setting affinities against the real kernel: cpusets, capabilities, zombies, reused tids."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kata_pin.base.counters import PF_NO_SETAFFINITY
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import Action
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import Outcome
from kata_pin.linux.affinity import apply_all, rt_node
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HOST
from kata_pin.linux.process import ProcessIndex
from kata_pin.linux.tasks import get_affinity, read_task, starttime
from tests.support.specimen import cpuset_cgroup, specimen, two_cpus
from tests.support.waiting import wait_for

REPOSITORY = Path(__file__).parents[2]


def action(tgid: int, tid: int, target: CpuSet) -> Action:
    key = ThreadKey(tgid, tid, starttime(HOST, tgid, tid))
    return Action(key, target, get_affinity(tid), "test")


def test_bystanders_never_change() -> None:
    """While every thread of one process is moved about, no thread of another one moves."""
    first, second = two_cpus()
    with specimen(8) as ours, specimen(8) as bystander:
        before = {tid: get_affinity(tid) for tid in [*bystander.tids, os.getpid(), 1]}
        keys = [ThreadKey(ours.pid, tid, starttime(HOST, ours.pid, tid)) for tid in ours.tids]
        for cpu in (first, second, first):
            target = CpuSet([cpu])
            results = apply_all(HOST, [Action(key, target, target, "test") for key in keys])
            assert {r.outcome for r in results} == {Outcome.DONE}
        foreign = [ThreadKey(ours.pid, tid, keys[0].starttime) for tid in bystander.tids]
        results = apply_all(HOST, [Action(key, CpuSet([first]), CpuSet(), "") for key in foreign])
        assert {r.outcome for r in results} == {Outcome.GONE}, "listed under another process"
        assert {tid: get_affinity(tid) for tid in before} == before


@pytest.mark.root
def test_cpuset_in_the_way() -> None:
    """Outside of its cpuset a thread is refused, half outside clipped; the cgroup is named."""
    first, second = two_cpus()
    with specimen(1) as ours, cpuset_cgroup(str(second)) as group:
        group.take(ours.pid)
        tid = ours.tids[1]
        task = read_task(HOST, ours.pid, tid, CpusetReader(HOST))
        assert task.cgroup.endswith(group.path)
        assert task.cpuset == CpuSet([second])
        refused = apply_all(HOST, [action(ours.pid, tid, CpuSet([first]))])[0]
        assert (refused.outcome, refused.after) == (Outcome.REFUSED, None)
        clipped = apply_all(HOST, [action(ours.pid, tid, CpuSet([first, second]))])[0]
        assert (clipped.outcome, clipped.after) == (Outcome.CLIPPED, CpuSet([second]))
        ours.child.kill()
        ours.child.wait()


@pytest.mark.root
def test_cpuset_is_read_anew_each_pass() -> None:
    """A cpuset that changes between two passes is seen by the second."""
    first, second = two_cpus()
    with specimen() as ours, cpuset_cgroup(str(second)) as group:
        group.take(ours.pid)
        assert CpusetReader(HOST).of(ours.pid, ours.pid)[1] == CpuSet([second])
        group.allow(f"{first},{second}")
        assert CpusetReader(HOST).of(ours.pid, ours.pid)[1] == CpuSet([first, second])
        ours.child.kill()
        ours.child.wait()


@pytest.mark.root
def test_denied_without_the_capability() -> None:
    """Even as uid 0, a process without CAP_SYS_NICE is DENIED for one that has capabilities."""
    first, _ = two_cpus()
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    program = (
        "import sys; from tests.integration.test_affinity_kernel import *;"
        "pid = int(sys.argv[1]);"
        f"print(apply_all(HOST, [action(pid, pid, CpuSet([{first}]))])[0].outcome.value)"
    )
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    with specimen() as ours:
        before = get_affinity(ours.pid)
        answer = subprocess.run(
            [*drop, sys.executable, "-c", program, str(ours.pid)],
            capture_output=True,
            text=True,
            check=True,
            cwd=REPOSITORY,
        )
        assert answer.stdout.strip() == "denied"
        assert get_affinity(ours.pid) == before


def test_zombie() -> None:
    """A zombie is still listed: setting it is harmless, and once reaped it is GONE."""
    first, _ = two_cpus()
    child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    try:
        todo = action(child.pid, child.pid, CpuSet([first]))
        child.send_signal(signal.SIGKILL)
        stat = Path(f"/proc/{child.pid}/stat")
        wait_for(lambda: ") Z " in stat.read_text(), "a zombie")
        assert apply_all(HOST, [todo])[0].outcome in {Outcome.DONE, Outcome.GONE}
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    assert apply_all(HOST, [todo])[0].outcome is Outcome.GONE


@pytest.mark.root
def test_kernel_thread_that_is_fixed() -> None:
    """A kernel worker that nobody may move is FIXED, not refused by a cpuset."""
    index = ProcessIndex(HOST)
    index.refresh()
    fixed = [p for p in index.all() if p.kernel and p.flags & PF_NO_SETAFFINITY]
    if not fixed or os.geteuid() != 0:
        pytest.skip("needs root and the kernel's own threads in sight")
    # Per-CPU threads such as cpuhp/0 live as long as the kernel; a kworker may end at any time.
    pid = min(process.pid for process in fixed)
    before = get_affinity(pid)
    assert apply_all(HOST, [action(pid, pid, before)])[0].outcome is Outcome.FIXED
    assert get_affinity(pid) == before


@pytest.mark.root
@pytest.mark.parametrize("case", ["before", "during", "all-before", "all-during"])
def test_reused_tid(case: str) -> None:
    """A tid that the kernel really gave to another thread is told, before and during the call.

    In a pid namespace of its own, where numbers can be chosen (ns_last_pid).
    """
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    answer = subprocess.run(
        [*namespace, sys.executable, "-m", "tests.support.reused_tid", case],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert answer.returncode == 0, answer.stderr
    told = {"before": ["reused", "untouched"], "during": ["gone"], "all-during": ["reused"]}
    assert answer.stdout.split() == told.get(case, told["before"])


def test_what_this_node_says_of_real_time() -> None:
    """Its limits, and the class of its own ksoftirqd."""
    index = ProcessIndex(HOST)
    index.refresh()
    first, _ = two_cpus()
    node = rt_node(HOST, index.all(), {first})
    assert node.runtime_us is not None
    assert f"ksoftirqd/{first}" in node.guards[first]
