"""Isolated CPUs: nothing balances there, so every thread gets one (D11)."""

from __future__ import annotations

from kata_pin.base.sandbox import Thread
from kata_pin.base.settings import PlacementSettings, VcpuMode
from kata_pin.base.values import ThreadRole
from tests.support.at_once import place
from tests.support.world import (
    after,
    applied,
    exclusive,
    flat,
    isolating,
    main_thread,
    node,
    overhead,
    sandbox,
    shared,
    smt_host,
    thread,
    vcpus,
)

IOTHREAD = ThreadRole.IOTHREAD


def iothreads(count: int, cpuset: str = "0-15") -> list[Thread]:
    """Return that many iothreads."""
    return [thread(IOTHREAD, 1001 + i, cpuset=cpuset) for i in range(count)]


def where(threads: list[Thread], isolated: str, *containers: str) -> list[str]:
    """Place threads of a sandbox with shared cpusets on a flat host; return what is applied."""
    records = [shared(f"s{i}", text) for i, text in enumerate(containers)]
    at = node(isolating(flat(16), isolated))
    found = place(sandbox(*records), threads, at)
    return [str(found.desired[one.key].applied) for one in threads]


def test_dealt_round_robin() -> None:
    """Threads take the isolated CPUs of their set in turn."""
    assert where(iothreads(5), "4-15", "4-6") == ["4", "5", "6", "4", "5"]


def test_round_robin_in_topology_order() -> None:
    """Dealing follows topology order: both threads of a core before the next."""
    at = node(isolating(smt_host(), "0-15"))
    threads = iothreads(4)
    found = place(sandbox(shared("s", "4-5,12-13")), threads, at)
    assert [str(found.desired[one.key].applied) for one in threads] == ["4", "12", "5", "13"]


def test_not_isolated_is_not_dealt() -> None:
    """Where the scheduler balances, threads keep their whole set."""
    assert where(iothreads(2), "8-15", "4-6") == ["4-6", "4-6"]


def test_a_set_that_touches_isolated_cpus_is_dealt_whole() -> None:
    """A mixed set is dealt over all its CPUs."""
    assert where(iothreads(3), "5-6", "4-6") == ["4", "5", "6"]


def test_floating_vcpus_get_one_each() -> None:
    """Also vCPUs on the mask get one CPU each."""
    threads = vcpus(0, 1, 2)
    at = node(isolating(flat(16), "4-6"), PlacementSettings(vcpus=VcpuMode.FLOAT))
    found = place(sandbox(shared("s", "4-6")), threads, at)
    assert applied(found, threads) == {"vcpu 0": "4", "vcpu 1": "5", "vcpu 2": "6"}


def test_runs_get_one_each_and_free_the_rest() -> None:
    """A vCPU paired with several isolated CPUs takes one; overhead goes to those left over."""
    threads = [*vcpus(0, 1), *iothreads(2)]
    at = node(isolating(flat(16), "4-7"), PlacementSettings(overhead=overhead("sandbox")))
    found = place(sandbox(exclusive("a", "4-7")), threads, at)
    assert [str(found.desired[one.key].applied) for one in threads] == ["4", "6", "5", "7"]


def test_overhead_takes_unpaired_cpus_first() -> None:
    """Overhead on the mask keeps off paired CPUs, and is not dealt where the rest is balanced."""
    threads = [*vcpus(0, 1, 2), *iothreads(2)]
    of = PlacementSettings(overhead=overhead("sandbox"))
    at = node(isolating(flat(16), "4-5"), of)
    found = place(sandbox(exclusive("a", "4-5"), shared("s", "2-3")), threads, at)
    assert [str(found.desired[one.key].applied) for one in threads] == [
        "2-3",
        "4",
        "5",
        "2-3",
        "2-3",
    ]
    assert not found.notes


def test_overhead_on_paired_cpus_when_there_is_nothing_else() -> None:
    """A VM locked into paired CPUs spreads its overhead over them."""
    threads = [*vcpus(0, 1), *iothreads(3)]
    at = node(isolating(flat(16), "4-5"))
    found = place(sandbox(exclusive("a", "4-5")), threads, at)
    assert [str(found.desired[one.key].applied) for one in threads] == ["4", "5", "4", "5", "4"]


def test_main_thread_without_live_threads_is_dealt_too() -> None:
    """A wide mask on isolated CPUs helps no new thread: it would be born on one CPU anyway."""
    one = main_thread()
    at = node(isolating(flat(16), "4-6"), live_threads=False)
    found = place(sandbox(shared("s", "4-6")), [one], at)
    assert applied(found, [one]) == {"emulator": "4"}


def test_dealing_is_stable_when_threads_come_and_go() -> None:
    """Threads that sit well stay: of five, one exits and one is born, and only that one is set."""
    at = node(isolating(flat(16), "4-6"))
    pod = sandbox(shared("s", "4-6"))
    threads = iothreads(5)
    standing = after(place(pod, threads, at), threads)
    fewer = [one for one in standing if one.key.tid != 1002]
    now = [*fewer, thread(IOTHREAD, 1009, on="4-6")]
    found = place(pod, now, at)
    assert [str(found.desired[one.key].applied) for one in now] == ["4", "6", "4", "5", "5"]


def test_crowded_threads_are_spread() -> None:
    """New threads inherit one CPU: no more than a fair share of them stays on it."""
    threads = [thread(IOTHREAD, 1001 + i, on="5") for i in range(4)]
    assert where(threads, "4-7", "4-6") == ["5", "5", "4", "6"]


def test_reason_says_isolated() -> None:
    """The reason tells why one CPU stands where several were wanted."""
    one = main_thread()
    found = place(sandbox(shared("s", "4-6")), [one], node(isolating(flat(16), "4-6")))
    assert str(found.desired[one.key].wanted) == "4-6"
    assert "isolated" in found.desired[one.key].reason
