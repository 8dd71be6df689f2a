"""What can be applied of what is wanted (D7)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY
from kata_pin.base.placement import SandboxMask
from kata_pin.base.settings import PlacementSettings
from kata_pin.base.values import ThreadRole
from kata_pin.placement.masks import Want, WantKind
from kata_pin.placement.place import Step, fit, within
from tests.support.at_once import place
from tests.support.world import (
    applied,
    codes,
    cpus,
    exclusive,
    flat,
    main_thread,
    node,
    overhead,
    pause,
    sandbox,
    shared,
    thread,
    vcpu,
    vcpus,
    without,
)

STEPS = (
    (Step.SHARED, cpus("2-3")),
    (Step.RESERVE, cpus("5")),
    (Step.SURPLUS, cpus("8-9")),
)


@pytest.mark.parametrize(
    ("wanted", "cpuset", "online", "expected", "step"),
    [
        pytest.param("4-5", "0-15", "0-15", "4-5", "", id="allowed"),
        pytest.param("4-5", "5-6", "0-15", "5", "", id="cut to the cpuset"),
        pytest.param("4-5", "0-15", "0-4", "4", "", id="cut to online"),
        pytest.param("4-5", "", "0-15", "4-5", "", id="unknown cpuset: only online limits"),
        pytest.param("4-5", "", "0-3", "2-3", "shared", id="unknown cpuset, offline"),
        pytest.param("4", "3,5,8,10", "0-15", "3", "shared", id="first: shared CPUs"),
        pytest.param("4", "5,8,10", "0-15", "5", "reserve", id="then reserve CPUs"),
        pytest.param("4", "8,10", "0-15", "8", "surplus", id="then CPUs of surplus vCPUs"),
        pytest.param("4", "10-12", "0-15", "10-12", "cpuset", id="then the cpuset"),
        pytest.param("4", "10-12", "0-10", "10", "cpuset", id="the cpuset ∩ online"),
        pytest.param("4", "12", "0-1", "0-1", "online", id="a cpuset that is all off"),
        pytest.param("", "3,10", "0-15", "3", "shared", id="nothing wanted"),
        pytest.param("4", "", "6-7", "6-7", "online", id="unknown cpuset and no step: online"),
    ],
)
def test_steps_in_order(wanted: str, cpuset: str, online: str, expected: str, step: str) -> None:
    """Wanted ∩ cpuset ∩ online, else the first step that leaves anything."""
    found = within(cpus(wanted), cpus(cpuset), cpus(online), STEPS)
    assert (str(found[0]), found[1].value) == (expected, step)


A2 = exclusive("a", "4-5")


def test_the_report_names_step_and_cgroup() -> None:
    """The desired state says which step was taken and which cgroup is in the way."""
    one = main_thread(cpuset="4-5")
    where = node(settings=PlacementSettings(overhead=overhead("0-1")))
    found = place(sandbox(A2), [one], where)
    desired = found.desired[one.key]
    assert (str(desired.wanted), str(desired.applied), desired.step) == ("0-1", "4-5", "cpuset")
    assert "cgroup /kata_pod allows only 4-5" in desired.reason
    (note,) = found.notes
    assert note.code == "fallback"
    assert "1 thread cannot run on 0-1 (cgroup /kata_pod" in note.text


def test_a_cgroup_that_still_has_what_the_sandbox_gave_up() -> None:
    """Of a cpuset wider than the sandbox only the sandbox's part is used while there is one."""
    one = main_thread(cpuset="4-7")
    where = node(settings=PlacementSettings(overhead=overhead("0-1")))
    desired = place(sandbox(A2), [one], where).desired[one.key]
    assert (str(desired.applied), desired.step) == ("4-5", "cpuset")
    elsewhere = main_thread(cpuset="6-7")
    desired = place(sandbox(A2), [elsewhere], where).desired[elsewhere.key]
    assert (str(desired.applied), desired.step) == ("6-7", "cpuset")


def test_vcpu_that_may_not_have_its_pair_is_not_paired() -> None:
    """A vCPU whose cgroup lacks its CPU falls back, and nobody calls that a pair."""
    threads = [vcpu(0), vcpu(1, cpuset="0-3"), vcpu(2)]
    found = place(sandbox(A2, shared("s", "2-3")), threads, node())
    assert applied(found, threads) == {"vcpu 0": "2-3", "vcpu 1": "2-3", "vcpu 2": "5"}
    assert not found.desired[threads[1].key].paired
    assert found.desired[threads[1].key].step == "shared"


def test_paired_vcpu_never_falls_back_to_the_pause_containers_cpus() -> None:
    """The pod sandbox's own CPUs are a fallback for overhead, not for a vCPU to be paired."""
    threads = [vcpu(0), vcpu(1, cpuset="8-9"), vcpu(2), main_thread(cpuset="8-10")]
    of = PlacementSettings(
        overhead=overhead("1"), overhead_roles={ThreadRole.VCPU: overhead("auto")}
    )
    found = place(sandbox(pause("8"), A2), threads, node(settings=of))
    assert applied(found, threads)["vcpu 0"] == "8"
    assert found.desired[threads[1].key].step == "cpuset"
    assert found.desired[threads[3].key].step == "shared"
    assert applied(found, threads)["emulator"] == "8"


def test_surplus_cpus_are_a_step() -> None:
    """Overhead that can not have its own CPUs joins the surplus vCPUs."""
    threads = [*vcpus(0, 1, 2), main_thread(cpuset="4-5,10")]
    of = PlacementSettings(overhead=overhead("0"), overhead_roles={ThreadRole.VCPU: overhead("10")})
    found = place(sandbox(A2), threads, node(settings=of))
    assert found.desired[threads[3].key].step == "surplus"
    assert applied(found, threads)["emulator"] == "10"


def test_shared_before_reserve_before_surplus() -> None:
    """With all three in reach the order is that of D7."""
    of = PlacementSettings(
        overhead=overhead("0"),
        overhead_roles={
            ThreadRole.VCPU: overhead("10"),
            ThreadRole.IOTHREAD: overhead("reserve:1"),
        },
    )
    containers = (exclusive("a", "4-6"), shared("s", "2"))
    wide, narrow = main_thread(cpuset="2-10"), main_thread(cpuset="4-10")
    for one, step in ((wide, "shared"), (narrow, "reserve")):
        found = place(sandbox(*containers), [*vcpus(0, 1, 2), one], node(settings=of))
        assert found.desired[one.key].step == step


def test_reserve_is_a_step() -> None:
    """A role that can not have its own CPUs takes the reserve when nothing is shared."""
    threads = [thread(ThreadRole.IOTHREAD, 1001, cpuset="4-5")]
    of = PlacementSettings(
        overhead=overhead("reserve:1"), overhead_roles={ThreadRole.IOTHREAD: overhead("0")}
    )
    found = place(sandbox(A2), threads, node(settings=of))
    assert found.desired[threads[0].key].step == "reserve"
    assert applied(found, threads) == {"iothread": "5"}


@pytest.mark.parametrize(
    ("housekeeping", "said"),
    [("", "no CPUs are set"), ("14", "those CPUs are offline"), ("0-1", "allows only 2-13")],
    ids=["not set", "offline", "outside the cpuset"],
)
def test_housekeeping_out_of_reach(housekeeping: str, said: str) -> None:
    """A housekeeping list that does not help is told apart: unset, offline, or the cgroup."""
    one = main_thread(cpuset="2-13")
    of = PlacementSettings(overhead=overhead("housekeeping"), housekeeping=cpus(housekeeping))
    where = node(without(flat(16), "14-15"), of)
    found = place(sandbox(A2, shared("s", "2-3")), [one], where)
    assert applied(found, [one]) == {"emulator": "2-3"}
    assert found.desired[one.key].step == "shared"
    assert said in found.desired[one.key].reason


def test_everything_exclusive_is_offline() -> None:
    """With every CPU of the mask off, threads go to what their cpuset still has."""
    threads = [*vcpus(0, 1), main_thread()]
    found = place(sandbox(A2), threads, node(without(flat(16), "4-5")))
    assert set(applied(found, threads).values()) == {"0-3,6-15"}
    assert {one.step for one in found.desired.values()} == {"cpuset"}
    assert "exclusive-offline" in codes(found)


def test_unknown_cpuset() -> None:
    """A thread whose cgroup could not be read is limited by online CPUs only."""
    threads = [one._replace(task=replace(one.task, cpuset=cpus(""))) for one in vcpus(0, 1)]
    found = place(sandbox(A2), threads, node())
    assert applied(found, threads) == {"vcpu 0": "4", "vcpu 1": "5"}


def test_threads_of_two_cgroups_fit_apart() -> None:
    """They want the same CPUs, and each gets those of its own cpuset."""
    mask = SandboxMask(cpus("0-1"), shared=cpus("0-1"))
    wants = [
        Want(
            thread(ThreadRole.EMULATOR, 1001 + cpu, cpuset=str(cpu)),
            cpus("0-1"),
            WantKind.OVERHEAD,
            "",
        )
        for cpu in (0, 1)
    ]
    fits, _ = fit(wants, mask, EMPTY, cpus("0-3"))
    assert [str(one.applied) for one in fits] == ["0", "1"]
