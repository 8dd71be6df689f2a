"""Giving pins back (DESIGN D18)."""

from __future__ import annotations

import pytest

from kata_pin.model.node import PlacementSettings
from kata_pin.model.placement import VcpuMode
from kata_pin.model.thread import ThreadRole
from kata_pin.model.topology import flat
from kata_pin.policy.place import place
from kata_pin.policy.release import release
from tests.support.world import (
    applied,
    codes,
    cpus,
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
