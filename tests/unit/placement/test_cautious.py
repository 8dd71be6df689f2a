"""`pin` without the daemon: no thread gains an exclusive pCPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from kata_pin.base.placement import Node, Placement
from kata_pin.base.sandbox import Container, Thread
from kata_pin.base.values import RoleSource, ThreadRole
from kata_pin.placement.drift import find_drift, make_plan
from kata_pin.placement.place import OthersCpus, without_gains
from kata_pin.placement.place import pairs as pairs_of
from tests.support.at_once import place
from tests.support.world import (
    applied,
    cpus,
    exclusive,
    main_thread,
    node,
    sandbox,
    shared,
    thread,
    vcpu,
)

OFFLINE = node(live_threads=False)
NOBODY = OthersCpus()


def placed(containers: Sequence[Container], threads: list[Thread], at: Node = OFFLINE) -> Placement:
    return place(sandbox(*containers), threads, at)


def test_overhead_stays_off_the_pairs_of_its_own_sandbox() -> None:
    """The main thread, which gets the whole mask where no event reports threads, gains no pair."""
    threads = [vcpu(0, on="4"), vcpu(1, on="5"), main_thread(on="6-7")]
    found = placed([exclusive("app", "4-5"), shared("log", "6-7")], threads)
    assert applied(found, threads)["emulator"] == "4-7"
    limited, said = without_gains(found, threads, {}, NOBODY)
    assert applied(limited, threads)["emulator"] == "6-7"
    assert applied(limited, threads)["vcpu 1"] == "5"
    assert make_plan(limited, threads) == ()
    assert [one.code for one in said] == ["offline-narrow"]
    assert "1 thread" in said[0].text
    assert "4-5" in said[0].text


def test_what_only_narrows_is_set() -> None:
    """A sandbox that was never pinned is: its threads lose CPUs, and vCPUs get their own."""
    threads = [vcpu(0), vcpu(1), main_thread()]
    found = placed([exclusive("app", "4-5"), shared("log", "6-7")], threads)
    limited, said = without_gains(found, threads, {}, OthersCpus(cpus("0-3")))
    assert limited is found
    assert said == ()


@pytest.mark.parametrize("index", [0, 1])
def test_cpus_of_other_sandboxes_are_not_gained(index: int) -> None:
    """A cpuset that still has what another pod holds: neither vCPUs nor overhead go there."""
    threads = [vcpu(index, on="6"), main_thread(on="6")]
    found = placed([shared("app", "4-7")], threads)
    limited, said = without_gains(found, threads, {}, OthersCpus(cpus("4-5")))
    assert set(applied(limited, threads).values()) == {"6-7"}
    assert len(said) == 1


def test_a_pair_on_anothers_cpu_is_left() -> None:
    """A vCPU whose pCPU another sandbox claims stays where it is."""
    threads = [vcpu(0, on="6")]
    found = placed([exclusive("app", "4")], threads)
    limited, _ = without_gains(found, threads, {}, OthersCpus(cpus("4")))
    assert applied(limited, threads) == {"vcpu 0": "6"}


def test_what_is_not_known_gives_nothing() -> None:
    """With a checkpoint that cannot be read threads lose CPUs, but gain only a stored pair."""
    missing = OthersCpus(unknown="the checkpoint is damaged")
    threads = [vcpu(0, on="9"), vcpu(1, on="9"), main_thread(on="6,9")]
    found = placed([exclusive("app", "4-5"), shared("log", "6-7")], threads)
    pairs = {threads[1].key: 5}
    limited, said = without_gains(found, threads, pairs, missing)
    assert applied(limited, threads) == {"vcpu 0": "9", "vcpu 1": "5", "emulator": "6"}
    assert "the checkpoint is damaged" in said[0].text


def test_a_stored_vcpu_that_is_not_recognised_stays() -> None:
    """Without QMP and debugfs a vCPU may pass for an emulator thread: its pair says what it is."""
    one = thread(ThreadRole.EMULATOR, vcpu(1).key.tid, on="5")
    threads = [one, main_thread(on="6-7")]
    found = placed([exclusive("app", "4-5"), shared("log", "6-7")], threads)
    limited, said = without_gains(found, threads, {one.key: 5}, NOBODY)
    assert limited.desired[one.key].applied == cpus("5")
    assert pairs_of(limited) == {one.key: 5}
    assert len(said) == 1
    assert find_drift(limited, [one]) != ()  # the main thread alone, which is not among them
    disputed = Thread(one.task, replace(vcpu(1).role, source=RoleSource.NAME, conflict="?"))
    found = placed([exclusive("app", "4-5"), shared("log", "6-7")], [disputed])
    limited, _ = without_gains(found, [disputed], {one.key: 5}, NOBODY)
    assert limited.desired[one.key].applied == cpus("5")


def test_an_undo_for_lack_of_a_cpuset_gains_nothing_exclusive() -> None:
    """Released because no container has a cpuset any more: not onto other pods' CPUs."""
    threads = [main_thread(on="4")]
    found = placed([shared("app", None)], threads, node(release_mask="0-15"))
    limited, _ = without_gains(found, threads, {}, OthersCpus(cpus("5-7")))
    one = limited.desired[threads[0].key]
    assert (one.release, one.applied, one.wanted) == (True, cpus("0-4,8-15"), cpus("0-4,8-15"))
