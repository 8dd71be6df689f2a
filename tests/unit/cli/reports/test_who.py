"""Who may run on a pCPU, seen on this very host: real processes, real threads."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.state import Sandbox
from tests.unit.cli import documents as docs
from tests.unit.conftest import Commands

Json = dict[str, Any]
CPUS = sorted(os.sched_getaffinity(0))


NODE = docs.state(cpus=max(CPUS) + 1, kubelet=None)
"""This host's CPUs, and no sandboxes."""


class Who:
    """What is said of this host's processes, beside a daemon with some sandboxes."""

    def __init__(self, commands: Commands) -> None:
        self.commands = commands

    def __call__(self, *cpus: int, among: tuple[Sandbox, ...] = ()) -> Json:
        """Return the document of `who`."""
        self.commands.state = replace(NODE, sandboxes=among)
        found: Json = self.commands.json("who", ",".join(map(str, cpus)))
        return found

    def groups(self, *among: Sandbox, of: str = "") -> list[Json]:
        """Return the groups of intruders that `check` finds, of one sandbox if one is named."""
        self.commands.state = replace(NODE, sandboxes=among)
        found = self.commands.json("check", "--all", *filter(None, [of]))
        return [one["group"] for one in found["findings"] if one["group"]]

    def intruders(self, *among: Sandbox, of: str = "") -> dict[int, Json]:
        """Return the processes of these groups by pid."""
        groups = self.groups(*among, of=of)
        return {one["pid"]: one for group in groups for one in group["processes"]}


@pytest.fixture
def who(commands: Commands) -> Who:
    commands.state = NODE
    return Who(commands)


def owner(cpu: int) -> Sandbox:
    """Return a sandbox with an exclusive pCPU."""
    return docs.sandbox("a/b", str(cpu), exclusive=str(cpu))


def pids(document: Json) -> set[int]:
    """Return the processes of a document."""
    return {one["pid"] for one in document["processes"]}


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
def test_only_threads_allowed_there_are_listed(who: Who) -> None:
    """A process confined to one CPU is listed there and not on the other."""
    here, there = CPUS[0], CPUS[1]
    with child({here}) as pid:
        assert pid in pids(who(here))
        assert pid not in pids(who(there))


def test_a_thread_is_its_processs_and_its_sandboxs(who: Who) -> None:
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
    thread = docs.thread(tids[0], "vcpu", str(cpu), vcpu=3)
    sandbox = docs.sandbox("ns/mine", str(cpu), thread, exclusive=str(cpu))
    found = who(cpu, among=(sandbox,))
    stop.set()
    worker.join(10)
    mine = next(one for one in found["processes"] if one["pid"] == os.getpid())
    assert (mine["pod"], mine["sandbox"], mine["intruder"]) == ("ns/mine", sandbox.id, False)
    (shown,) = (one for one in mine["threads"] if one["tid"] == tids[0])
    assert (shown["label"], shown["affinity"]) == ("vcpu 3", str(cpu))
    (claim,) = found["pcpus"][0]["claims"]
    assert (claim["sandbox"], claim["pod"], claim["claim"]) == (sandbox.id, "ns/mine", "exclusive")


def test_intruders_are_users_processes_on_anothers_exclusive_cpu(who: Who) -> None:
    """A process confined to an exclusive pCPU of a sandbox intrudes; a shared one is no matter.

    Of one sandbox alone, only its own exclusive pCPUs count.
    """
    cpu = CPUS[0]
    free = docs.sandbox("c/d", str(cpu))
    with child({cpu}) as pid:
        found = who.intruders(owner(cpu), free, of="a/b")
        assert who.intruders(owner(cpu), free, of="c/d") == {}
        assert who.intruders(docs.sandbox("a/b", str(cpu))) == {}
    assert [thread["tid"] for thread in found[pid]["threads"]] == [pid]
    assert found[pid]["intruder"]
    assert 2 not in found, "kthreadd is the kernel's"


def test_commands_of_kata_pin_are_not_named_after_who_runs_them(who: Who) -> None:
    """`kata-pin top` of a session that lists pods' CPUs is kata-pin's own, not that session's."""
    cpu = CPUS[0]
    with child({cpu}, "kata-pin") as own, child({cpu}) as other:
        groups = {group["name"]: group for group in who.groups(owner(cpu))}
    ours = groups.pop("kata-pin itself")
    assert (ours["cpus"], own in pids(ours)) == (str(cpu), True)
    assert ours["remedy"].startswith("kata-pin's own")
    assert any(other in pids(group) for group in groups.values())


def test_a_vmm_that_calls_itself_kata_pin_has_the_remedy_of_its_sandbox(who: Who) -> None:
    """It is named after its pod, and what it calls itself says nothing."""
    cpu = CPUS[0]
    with child({cpu}, "kata-pin") as vmm:
        other = docs.sandbox("c/d", None, docs.thread(vmm, "emulator", str(cpu)))
        (found,) = (one for one in who.groups(owner(cpu), other) if vmm in pids(one))
    assert found["name"] == "c/d"
    assert found["remedy"].startswith("apply the affinities of that sandbox again")


def test_a_sandboxs_own_threads_do_not_intrude(who: Who) -> None:
    """Threads that work for the owner are no intruders; those of another sandbox are."""
    cpu = CPUS[0]
    with child({cpu}) as pid:
        thread = docs.thread(pid, "vcpu", str(cpu))
        assert pid not in who.intruders(docs.sandbox("a/b", str(cpu), thread, exclusive=str(cpu)))
        assert pid in who.intruders(owner(cpu), docs.sandbox("c/d", None, thread))


def test_kernel_threads_are_summed_up_apart(who: Who) -> None:
    """Kernel threads are never among the processes; bound ones have this CPU alone."""
    found = who(CPUS[0])
    kernel = {one["tid"] for one in (*found["kernel"]["bound"], *found["kernel"]["roaming"])}
    assert not kernel & pids(found)


def test_an_offline_cpu_has_nobody(who: Who) -> None:
    """A present pCPU that is offline is told as such."""
    away = max(CPUS) + 2
    who.commands.state = docs.state(cpus=max(CPUS) + 1, kubelet=None, present=f"0-{max(CPUS) + 4}")
    found = who.commands.json("who", str(away))
    (offline,) = found["pcpus"]
    assert (offline["online"], offline["place"], found["processes"]) == (False, None, [])


def test_a_cpu_that_is_not_there_is_an_error(who: Who) -> None:
    """The error names those that are present."""
    status, out = who.commands.run("who", f"{CPUS[0]},8191", "--json")
    document = json.loads(out)
    assert (status, document["error"]) == (1, "no pCPU 8191 on this node")
    assert document["hint"] == f"present pCPUs: 0-{max(CPUS)}"


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_several_cpus_are_one_answer(who: Who) -> None:
    """A process is listed once, with what it may do on any of them; each pCPU has its claims."""
    first, second = CPUS[:2]
    with child({first}) as tame, child({second}) as intruder, child({first, second}) as both:
        found = who(first, second, among=(owner(second),))
        alone = who(first, among=(owner(second),))
    assert [one["cpu"] for one in found["pcpus"]] == [first, second]
    assert [one["claims"] != [] for one in found["pcpus"]] == [False, True]
    listed = [(one["pid"], one["intruder"]) for one in found["processes"]]
    assert all(listed.count(one) == 1 for one in ((tame, False), (intruder, True), (both, True)))
    assert not any(one["intruder"] for one in alone["processes"])
