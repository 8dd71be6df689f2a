"""Who may run on a pCPU, seen on this very host: real processes, real threads."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.measured import CpuClaim
from kata_pin.base.documents.state import State
from kata_pin.base.errors import KataPinError
from kata_pin.cli.reports import who as who_report
from kata_pin.linux.files import HOST
from kata_pin.linux.process import read_process
from tests.unit.cli import documents as docs

CPUS = sorted(os.sched_getaffinity(0))


def node_of_this_host() -> State:
    """Return a state document without sandboxes that covers this host's CPUs."""
    return docs.state(cpus=max(CPUS) + 1, kubelet=None)


@contextmanager
def child(cpus: set[int], name: str = "python") -> Iterator[int]:
    """Run a process confined to some CPUs."""
    code = f"import os,sys; os.sched_setaffinity(0, {cpus})"
    code += f"; open('/proc/self/comm', 'w').write({name!r}); print(1, flush=True)"
    code += "; sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate(timeout=10)


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_only_threads_allowed_there_are_listed() -> None:
    """A process confined to one CPU is listed there and not on the other."""
    here, there = CPUS[0], CPUS[1]
    with child({here}) as pid:
        listed = {
            cpu: {p.pid for p in who_report.who(node_of_this_host(), CpuSet([cpu])).processes}
            for cpu in (here, there)
        }
    assert pid in listed[here]
    assert pid not in listed[there]


def test_a_thread_is_its_processs_and_its_sandboxs() -> None:
    """Threads known from the state document bring their owner and their label."""
    cpu = CPUS[0]
    ready, stop = threading.Event(), threading.Event()
    tids: list[int] = []

    def work() -> None:
        tids.append(threading.get_native_id())
        os.sched_setaffinity(0, {cpu})
        ready.set()
        stop.wait(20)

    worker = threading.Thread(target=work)
    worker.start()
    ready.wait(10)
    sandbox = docs.sandbox(
        "ns/mine", str(cpu), docs.thread(tids[0], "vcpu", str(cpu), vcpu=3), exclusive=str(cpu)
    )
    state = node_of_this_host()
    state = replace(state, sandboxes=(sandbox,))
    found = who_report.who(state, CpuSet([cpu]))
    stop.set()
    worker.join(10)
    mine = next(p for p in found.processes if p.pid == os.getpid())
    assert (mine.pod, mine.sandbox, mine.intruder) == ("ns/mine", sandbox.id, False)
    thread = next(t for t in mine.threads if t.tid == tids[0])
    assert (thread.label, thread.affinity) == ("vcpu 3", str(cpu))
    assert found.pcpus[0].claims == (CpuClaim(sandbox.id, "ns/mine", "exclusive", ""),)


def test_intruders_are_users_processes_on_anothers_exclusive_cpu() -> None:
    """A process confined to an exclusive pCPU of a sandbox intrudes; a shared one is no matter."""
    cpu = CPUS[0]
    state = node_of_this_host()
    state = replace(state, sandboxes=(docs.sandbox("a/b", str(cpu), exclusive=str(cpu)),))
    with child({cpu}) as pid:
        found = {process.pid: (process, cpus) for process, cpus in who_report.intruders(state)}
        state = replace(state, sandboxes=(docs.sandbox("a/b", str(cpu)),))
        assert who_report.intruders(state) == []
    process, cpus = found[pid]
    assert cpus == CpuSet([cpu])
    assert [thread.tid for thread in process.threads] == [pid]
    assert process.intruder
    assert not any(read_process(HOST, p).kernel for p in found if p in {1, 2})


def test_commands_of_kata_pin_are_not_named_after_who_runs_them() -> None:
    """`kata-pin top` of a session that lists pods' CPUs is kata-pin's own, not that session's."""
    cpu = CPUS[0]
    state = node_of_this_host()
    state = replace(state, sandboxes=(docs.sandbox("a/b", str(cpu), exclusive=str(cpu)),))
    with child({cpu}, "kata-pin") as own, child({cpu}) as other:
        groups = who_report.groups(state, None, {})
    pids = {group.name: {process.pid for process in group.processes} for group in groups}
    (ours,) = (group for group in groups if group.name == "kata-pin itself")
    assert own in pids.pop("kata-pin itself")
    assert ours.remedy.startswith("kata-pin's own")
    assert any(other in those for those in pids.values())


def test_a_vmm_that_calls_itself_kata_pin_has_the_remedy_of_its_sandbox() -> None:
    """It is named after its pod, and what it calls itself says nothing."""
    cpu = CPUS[0]
    state = node_of_this_host()
    owner = docs.sandbox("a/b", str(cpu), exclusive=str(cpu))
    with child({cpu}, "kata-pin") as vmm:
        other = docs.sandbox("c/d", None, docs.thread(vmm, "emulator", str(cpu)))
        state = replace(state, sandboxes=(owner, other))
        groups = who_report.groups(state, None, {})
    (found,) = (one for one in groups if vmm in {process.pid for process in one.processes})
    assert found.name == "c/d"
    assert found.remedy.startswith("apply the affinities of that sandbox again")


def test_a_sandboxs_own_threads_do_not_intrude() -> None:
    """Threads that work for the owner are no intruders; those of another sandbox are."""
    cpu = CPUS[0]
    state = node_of_this_host()
    with child({cpu}) as pid:
        mine = docs.sandbox("a/b", str(cpu), docs.thread(pid, "vcpu", str(cpu)), exclusive=str(cpu))
        state = replace(state, sandboxes=(mine,))
        assert pid not in {process.pid for process, _ in who_report.intruders(state)}
        other = docs.sandbox("c/d", None, docs.thread(pid, "vcpu", str(cpu)))
        state = replace(state, sandboxes=(docs.sandbox("a/b", str(cpu), exclusive=str(cpu)), other))
        assert pid in {process.pid for process, _ in who_report.intruders(state)}


def test_kernel_threads_are_summed_up_apart() -> None:
    """Kernel threads are never among the processes; bound ones have this CPU alone."""
    found = who_report.who(node_of_this_host(), CpuSet(CPUS[:1]))
    kernel = {t.tid for t in (*found.kernel.bound, *found.kernel.roaming)}
    assert not kernel & {p.pid for p in found.processes}
    for process, threads in who_report.threads_on(CpuSet([CPUS[0]]), {}):
        assert process.kernel or not kernel & {thread.tid for thread in threads}


def test_an_offline_cpu_has_nobody() -> None:
    """A present pCPU that is offline is told as such."""
    state = docs.state(cpus=max(CPUS) + 1, kubelet=None, present=f"0-{max(CPUS) + 4}")
    found = who_report.who(state, CpuSet([max(CPUS) + 2]))
    (offline,) = found.pcpus
    assert (offline.online, offline.place, found.processes) == (False, None, ())


def test_a_cpu_that_is_not_there_is_an_error() -> None:
    """The error names those that are present."""
    with pytest.raises(KataPinError, match="no pCPU 8191 on this node") as caught:
        who_report.who(node_of_this_host(), CpuSet([CPUS[0], 8191]))
    assert caught.value.hint == f"present pCPUs: 0-{max(CPUS)}"


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_several_cpus_are_one_answer() -> None:
    """A process is listed once, with what it may do on any of them; each pCPU has its claims."""
    first, second = CPUS[:2]
    sandbox = docs.sandbox("a/b", str(second), exclusive=str(second))
    state = replace(node_of_this_host(), sandboxes=(sandbox,))
    with child({first}) as tame, child({second}) as intruder, child({first, second}) as both:
        found = who_report.who(state, CpuSet([first, second]))
    assert [one.cpu for one in found.pcpus] == [first, second]
    assert [one.claims != () for one in found.pcpus] == [False, True]
    listed = [(one.pid, one.intruder) for one in found.processes]
    assert all(listed.count(one) == 1 for one in ((tame, False), (intruder, True), (both, True)))
    alone = who_report.who(state, CpuSet([first]))
    assert not any(one.intruder for one in alone.processes)


def test_intruders_of_one_sandbox_alone() -> None:
    """Only the exclusive pCPUs of the sandboxes asked about count."""
    cpu = CPUS[0]
    mine = docs.sandbox("a/b", str(cpu), exclusive=str(cpu))
    state = replace(node_of_this_host(), sandboxes=(mine,))
    with child({cpu}) as pid:
        assert pid in {process.pid for process, _ in who_report.intruders(state, {mine.id})}
        assert who_report.intruders(state, {"another"}) == []
