"""The prove document: what a window and the state document make of each pCPU."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from kata_pin.base.counters import Measured
from kata_pin.base.documents.measured import ProveDocument, ProvedPcpu
from kata_pin.base.documents.state import State
from kata_pin.base.errors import HostError
from kata_pin.base.values import Method
from kata_pin.cli.reports import owners, prove
from kata_pin.cli.reports.findings import NOTHING
from kata_pin.cli.reports.prove import ProofRequest
from kata_pin.linux.files import HOST
from kata_pin.linux.switches import look_at
from tests.unit.cli import documents as docs
from tests.unit.cli.proved import measured, owned, proved


def of(document: ProveDocument, cpu: int) -> ProvedPcpu:
    return next(one for one in document.pcpus if one.cpu == cpu)


def test_each_pcpu_has_its_verdict() -> None:
    """One is violated, one proved, one offline; the worst is the verdict over all."""
    document = proved()
    verdicts = {one.cpu: one.verdict for one in document.pcpus}
    assert verdicts == {4: "violated", 5: "proved", 6: "unproved"}
    assert document.verdict == "violated"
    assert document.reason == "1 pCPU violated (4), 1 pCPU unproved (6), 1 pCPU proved (5)"


def test_who_ran_and_how_long() -> None:
    """Times add up to the window; tasks are listed worst class first, with what to do."""
    found = of(proved(), 4)
    parts = (found.own_ms, found.pod_ms, found.foreign_ms, found.unavoidable_ms, found.idle_ms)
    assert sum(one or 0 for one in parts) == 10_000
    assert found.foreign_slices == 5
    assert [(one.task_class, one.tid) for one in found.tasks] == [
        ("user", 900),
        ("user", 901),
        ("unbound-kernel", 41),
        ("same-pod", 4100),
        ("per-cpu-kernel", 40),
    ]
    shell = found.tasks[0]
    assert (shell.slices, shell.total_ms, shell.longest_ms) == (3, 1506.0, 1500.0)
    assert shell.command == "systemctl set-property cron.service AllowedCPUs=0-3,7-15"
    assert (found.own[0].label, found.own[0].ran_ms, found.own[0].waited_ms) == (
        "vcpu 0",
        7000.0,
        1546.0,
    )
    assert sum(bar.slices for bar in found.histogram) == 5
    assert shell.timeline[0].part == 20


def test_only_what_is_asked_for() -> None:
    """Of one sandbox only its own pCPUs, and their verdict."""
    second = owned().sandboxes[1]
    document = proved(about={second.id})
    assert [one.cpu for one in document.pcpus] == [6]
    assert document.verdict == "unproved"


def run(states: Iterable[State], *, wanted: ProofRequest | None = None) -> ProveDocument:
    given = iter(states)
    return prove.prove(lambda: next(given), wanted or ProofRequest(), meter=lambda *_: measured())


def test_a_vcpu_that_kata_pins_owns_its_pcpu() -> None:
    """Kata's own rule places it, kata-pin does not; its other unmanaged threads own nothing."""
    state = owned()
    threads = [
        replace(one, expected=None, desired=None, affinity="4", state="unmanaged")
        for one in state.sandboxes[0].threads
    ]
    first = replace(state.sandboxes[0], threads=tuple(threads))
    owner = owners.owners(replace(state, sandboxes=(first,)))[0]
    vcpus = {one.tid for one in threads if one.role == "vcpu"}
    assert owner.cpu == 4
    assert owner.own.keys() == owner.alone == vcpus
    assert len(vcpus) < len(threads)


def test_an_owner_that_changed_proves_nothing() -> None:
    """A pCPU that was not exclusive to its sandbox all the time is unproved."""
    before = owned()
    first, second = before.sandboxes
    after = replace(before, sandboxes=(replace(first, exclusive="4"), second))
    found = of(run([before, after]), 5)
    assert (found.verdict, found.reason) == (
        "unproved",
        "it did not stay exclusive to its sandbox",
    )


def test_a_thread_that_was_placed_meanwhile_is_its_owners() -> None:
    """New threads of the pod are no intruders once they are placed."""
    before = owned()
    first, second = before.sandboxes
    placed = docs.thread(900, "emulator", "4")
    after = replace(before, sandboxes=(replace(first, threads=(*first.threads, placed)), second))
    found = of(run([before, after]), 4)
    assert 900 in {one.tid for one in found.own}
    assert [one.tid for one in found.tasks if one.task_class == "user"] == [901]


def test_nothing_to_measure_is_no_proof() -> None:
    """Without exclusive pCPUs nothing is measured, and nothing proved."""

    def never(*_: object) -> Measured:
        raise AssertionError("nothing is to be measured")

    document = prove.prove(docs.state, ProofRequest(), meter=never)
    assert (document.verdict, document.reason) == ("unproved", "no sandboxes")
    assert document.method == Method.PERF.value
    state = docs.state(docs.database(), docs.sandbox("shop/log", "1"))
    chosen = ProofRequest({state.sandboxes[1].id})
    assert (
        prove.prove(lambda: state, chosen, meter=never).reason == "no exclusive pCPUs in shop/log"
    )


def test_free_pcpus_are_nobodys() -> None:
    """Remedies move tasks to pCPUs that neither a sandbox nor another holder has."""
    assert str(owners.free(owned())) == "0-3,7-15"
    given = owned()
    given = replace(given, node=replace(given.node, assigned="4-5,12-15"))
    assert str(owners.free(given)) == "0-3,7-11", "a pod without a VM has 12 to 15"
    allotted = docs.allotted()
    assert allotted.allocation is not None
    held = [one.cpus for one in allotted.allocation.holders if one.cpus]
    assert held
    assert all(cpu not in str(owners.free(allotted)).split(",") for cpu in held)


def test_a_kernel_that_does_not_let_us_measure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing measured is never "ok"; nothing exclusive needs no measurement."""

    def refused(*_: object) -> object:
        raise HostError("open a perf event of", "pCPUs 4-6", errno.EACCES, hint="needs root")

    monkeypatch.setattr(prove, "prove", refused)
    looked = prove.look(owned(), owned, ProofRequest(None, 2.0, 0.1))
    (why,) = looked.unknown
    assert why.startswith("exclusive pCPUs were not measured: open a perf event of pCPUs 4-6: ")
    empty = docs.state(docs.sandbox("a/b", "4"))
    assert prove.look(empty, lambda: empty, ProofRequest(None, 2.0, 0.1)) is NOTHING
    assert prove.look(owned(), owned, ProofRequest(None, 0.0, 0.1)) is NOTHING


def test_a_task_may_still_run_where_it_ran() -> None:
    """It lives under the same name and its affinity has the pCPU."""
    cpu = min(os.sched_getaffinity(0))
    (task, *_) = next(one for one in proved().pcpus if one.cpu == 4).tasks
    me = look_at(HOST, os.getpid())
    assert me is not None
    mine = replace(task, tid=me.tid, pid=me.pid, comm=me.comm)
    assert prove.may_still_run(mine, cpu)
    assert not prove.may_still_run(mine, 8191)
    assert not prove.may_still_run(replace(mine, comm="another"), cpu)
    assert not prove.may_still_run(replace(mine, tid=4_194_305), cpu)
