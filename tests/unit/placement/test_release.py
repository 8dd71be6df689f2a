"""Giving pins back (D18)."""

from __future__ import annotations

import pytest

from kata_pin.base.settings import PlacementSettings, VcpuMode
from kata_pin.base.values import ThreadRole
from kata_pin.placement.place import release, undo
from tests.support.at_once import place
from tests.support.world import (
    applied,
    codes,
    cpus,
    flat,
    main_thread,
    node,
    overhead,
    sandbox,
    shared,
    thread,
    vcpu,
    vcpus,
    without,
)


def test_no_mask_releases_every_thread() -> None:
    """Without a mask each thread gets the mask first seen for its role, else pid 1's."""
    threads = [*vcpus(0, on="4"), main_thread(on="4")]
    where = node(release_mask="0-7")
    first_seen = {ThreadRole.VCPU: cpus("0-11")}
    found = place(sandbox(shared("a", None)), threads, where, first_seen=first_seen)
    assert found.mask.mask is None
    assert applied(found, threads) == {"vcpu 0": "0-11", "emulator": "0-7"}
    assert all(one.release for one in found.desired.values())
    assert codes(found) == {"released"}


@pytest.mark.parametrize(
    ("cpuset", "offline", "mask", "expected"),
    [
        pytest.param("0-15", "6-15", "4-7", "4-5", id="∩ online"),
        pytest.param("5-9", "", "4-7", "5-7", id="∩ the cpuset"),
        pytest.param("8-9", "", "4-7", "8-9", id="else the cpuset"),
        pytest.param("8-9", "", "", "8-9", id="nothing known of pid 1"),
        pytest.param("", "", "", "0-15", id="nothing known at all"),
        pytest.param("8-9", "8-9", "8", "0-7,10-15", id="a cpuset that is off"),
    ],
)
def test_what_can_be_applied(cpuset: str, offline: str, mask: str, expected: str) -> None:
    """A release obeys the cgroup and the online CPUs like any other placement."""
    one = vcpu(0, cpuset=cpuset)
    found = place(sandbox(), [one], node(without(flat(16), offline), release_mask=mask))
    assert applied(found, [one]) == {"vcpu 0": expected}


def test_roles_left_alone_are_not_released() -> None:
    """What the settings leave alone was never ours: Kata's own pins survive a release."""
    threads = [*vcpus(0), main_thread(), thread(ThreadRole.SHIM, 77, tgid=77)]
    of = PlacementSettings(
        vcpus=VcpuMode.LEAVE, overhead_roles={ThreadRole.EMULATOR: overhead("leave")}
    )
    assert place(sandbox(), threads, node(settings=of)).desired == {}


def test_release_on_request() -> None:
    """`unpin` releases a sandbox that still has a mask."""
    one = vcpu(0, on="4")
    found = release("pod", [one], node(release_mask="0-3"))
    assert applied(found, [one]) == {"vcpu 0": "0-3"}
    assert found.desired[one.key].release


def test_undo_asks_for_the_whole_mask_even_where_nothing_shows() -> None:
    """A pin that a cpuset of the same CPUs hides would cut that cpuset when it grows."""
    hidden, gone = vcpu(0, on="4-5", cpuset="4-5"), vcpu(1, on="4", cpuset="4-5")
    found = release("pod", [hidden, gone], node(release_mask="0-7"))
    [action] = undo(found, [hidden])
    assert (str(action.target), str(action.ask), str(action.before)) == ("4-5", "0-7", "4-5")


def test_undo_asks_for_no_mask_that_the_kernel_refuses() -> None:
    """Where the cpuset has none of the mask, what can be applied is all that can be asked."""
    one = vcpu(0, on="8", cpuset="8-9")
    [action] = undo(release("pod", [one], node(release_mask="4-7")), [one])
    assert str(action.target) == "8-9"
    assert not action.ask


def test_undo_leaves_other_writers_threads() -> None:
    """A thread that another writer keeps moving is theirs."""
    one = vcpu(0, on="4")
    assert undo(release("pod", [one], node(release_mask="0-7")), [one], skip=[one.key]) == ()
