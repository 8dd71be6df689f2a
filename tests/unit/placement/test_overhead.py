"""Where threads that are no vCPUs go (D11)."""

from __future__ import annotations

import pytest

from kata_pin.base.placement import Node
from kata_pin.base.sandbox import Container
from kata_pin.base.settings import PlacementSettings
from kata_pin.base.values import ThreadRole
from kata_pin.placement.pairing import reserve_size, setting_for
from tests.support.at_once import place
from tests.support.world import (
    applied,
    codes,
    cpus,
    exclusive,
    main_thread,
    node,
    overhead,
    pause,
    sandbox,
    shared,
    thread,
    vcpus,
)

A2 = exclusive("a", "4-5")
S = shared("s", "2-3")
EMULATOR, IOTHREAD, VHOST = ThreadRole.EMULATOR, ThreadRole.IOTHREAD, ThreadRole.VHOST


def settings(text: str, housekeeping: str = "", **roles: str) -> PlacementSettings:
    """Return settings with this overhead, and others for roles."""
    return PlacementSettings(
        overhead=overhead(text),
        overhead_roles={ThreadRole(name): overhead(value) for name, value in roles.items()},
        housekeeping=cpus(housekeeping),
    )


@pytest.mark.parametrize(
    ("text", "containers", "at", "cpuset", "expected"),
    [
        pytest.param("auto", (A2, S), node(default="0-1"), "0-15", "2-3", id="auto: shared first"),
        pytest.param(
            "auto",
            (pause("8"), A2, S),
            node(default="0-1"),
            "0-15",
            "2-3,8",
            id="auto: with the pause container's",
        ),
        pytest.param(
            "auto", (pause("8"), A2), node(default="0-1"), "0-15", "8", id="auto: only the pause's"
        ),
        pytest.param(
            "auto", (A2,), node(default="0-1"), "0-15", "0-1", id="auto: else the kubelet's default"
        ),
        pytest.param(
            "auto", (A2,), node(default="0-1"), "1,4-5", "1", id="auto: what the cgroup has of it"
        ),
        pytest.param(
            "auto", (A2,), node(default="0-1"), "", "0-1", id="auto: an unknown cgroup allows it"
        ),
        pytest.param(
            "auto", (A2,), node(default="0-1"), "4-5", "4-5", id="auto: else the sandbox mask"
        ),
        pytest.param("auto", (A2,), node(), "0-15", "4-5", id="auto: no kubelet, the mask"),
        pytest.param("sandbox", (A2, S), node(), "0-15", "2-5", id="sandbox: the mask"),
        pytest.param(
            "sandbox", (pause("8"), A2), node(), "0-15", "4-5,8", id="sandbox: and the pause's"
        ),
        pytest.param("housekeeping", (A2, S), node(), "0-15", "0", id="housekeeping"),
        pytest.param("10-11", (A2, S), node(), "0-15", "10-11", id="a cpu list"),
        pytest.param("reserve:1", (A2, S), node(), "0-15", "5", id="reserve:1"),
        pytest.param("leave", (A2, S), node(), "0-15", "", id="leave"),
    ],
)
def test_modes(
    text: str, containers: tuple[Container, ...], at: Node, cpuset: str, expected: str
) -> None:
    """Each overhead mode, and the order inside auto."""
    one = thread(IOTHREAD, 1001, cpuset=cpuset)
    # the checkpoint names the exclusive containers too, so that it agrees with inference
    kubelet = at.kubelet and type(at.kubelet)(
        "static", at.kubelet.default, entries={"uid": {"a": cpus("4-5")}}
    )
    where = Node(at.topology, settings(text, housekeeping="0"), kubelet)
    found = place(sandbox(*containers), [one], where)
    assert applied(found, [one]).get("iothread", "") == expected
    assert all(desired.step == "" for desired in found.desired.values())


def test_every_role_by_default() -> None:
    """Every thread that is no vCPU goes to overhead; the shim is not touched unless set."""
    threads = [thread(role, 2000 + i) for i, role in enumerate(ThreadRole) if role != "vcpu"]
    found = applied(place(sandbox(A2, S), threads, node()), threads)
    assert found == dict.fromkeys(("iothread", "emulator", "vhost", "virtiofsd", "kvm"), "2-3")


def test_settings_per_role() -> None:
    """A role's own setting beats the general one; the shim can be included so."""
    threads = [
        thread(IOTHREAD, 1),
        thread(VHOST, 2),
        thread(EMULATOR, 3),
        thread(ThreadRole.SHIM, 4),
    ]
    where = node(settings=settings("sandbox", iothread="10", vhost="leave", shim="auto"))
    found = applied(place(sandbox(A2, S), threads, where), threads)
    assert found == {"iothread": "10", "emulator": "2-5", "shim": "2-3"}


def test_setting_for() -> None:
    """The shim has no setting but its own."""
    of = settings("sandbox")
    assert str(setting_for(of, EMULATOR)) == "sandbox"
    assert str(setting_for(of, ThreadRole.SHIM)) == "leave"


def test_reserve_shrinks_pairs() -> None:
    """reserve:k: overhead and surplus vCPUs share the last k CPUs, x shrinks by k."""
    threads = [*vcpus(0, 1, 2, 3, 4), main_thread()]
    where = node(settings=settings("reserve:1"))
    found = place(sandbox(exclusive("a", "4-7")), threads, where)
    assert applied(found, threads) == {
        "vcpu 0": "7",
        "vcpu 1": "7",
        "vcpu 2": "4",
        "vcpu 3": "5",
        "vcpu 4": "6",
        "emulator": "7",
    }
    assert codes(found) == set()


def test_reserve_of_one_role() -> None:
    """Each role has its own k of the end; the largest k shrinks x, thread or no thread."""
    threads = [*vcpus(0, 1, 2), main_thread(), thread(IOTHREAD, 1001), thread(VHOST, 1002)]
    of = settings("reserve:1", iothread="reserve:2", vhost="reserve:0")
    assert reserve_size(of) == 2
    found = place(sandbox(exclusive("a", "4-7")), threads, node(settings=of))
    assert applied(found, threads) == {
        "vcpu 0": "7",
        "vcpu 1": "4",
        "vcpu 2": "5",
        "emulator": "7",
        "iothread": "6-7",
        "vhost": "6-7",
    }
    assert found.desired[threads[-1].key].step == "reserve"  # reserve:0 names no CPU


@pytest.mark.parametrize("k", [2, 3, 500])
def test_reserve_of_everything(k: int) -> None:
    """reserve:k with k >= x leaves no pair: vCPUs take the mask, and it is said."""
    threads = [*vcpus(0, 1, 2), main_thread()]
    found = place(sandbox(A2, S), threads, node(settings=settings(f"reserve:{k}")))
    assert applied(found, threads) == {
        "vcpu 0": "2-5",
        "vcpu 1": "2-5",
        "vcpu 2": "2-5",
        "emulator": "4-5",
    }
    assert codes(found) == {"reserve-too-large"}


def test_reserve_without_exclusive_cpus() -> None:
    """With nothing exclusive there is nothing to reserve: the next fallback is taken."""
    found = place(sandbox(S), [main_thread()], node(settings=settings("reserve:1")))
    assert applied(found, [main_thread()]) == {"emulator": "2-3"}
    assert found.desired[main_thread().key].step == "shared"


def test_reserve_that_takes_a_container() -> None:
    """A container that loses every exclusive CPU to the reserve is named."""
    threads = vcpus(0, 1, 2)
    containers = (A2, exclusive("b", "6"))
    found = place(sandbox(*containers), threads, node(settings=settings("reserve:1")))
    assert applied(found, threads) == {"vcpu 0": "6", "vcpu 1": "4", "vcpu 2": "5"}
    assert codes(found) == {"reserve-takes-container"}


@pytest.mark.parametrize(
    ("text", "expected"), [("auto", "2-5"), ("reserve:1", "2-5"), ("leave", "")]
)
def test_main_thread_without_live_threads(text: str, expected: str) -> None:
    """New threads inherit the main thread's mask: unseen, they must be born on the sandbox mask."""
    threads = [main_thread(), thread(EMULATOR, 1001)]
    where = node(settings=settings(text), live_threads=False)
    found = place(sandbox(A2, S), threads, where)
    main = found.desired.get(threads[0].key)
    assert (str(main.applied) if main else "") == expected
    if main:
        assert found.desired[threads[1].key].applied != main.applied


def test_only_the_vmms_main_thread_is_kept_wide() -> None:
    """virtiofsd's main thread creates no vCPU: it goes to overhead also without live threads."""
    one = thread(ThreadRole.VIRTIOFSD, 3000, tgid=3000)
    found = place(sandbox(A2, S), [one], node(live_threads=False))
    assert applied(found, [one]) == {"virtiofsd": "2-3"}


def test_overhead_over_pairs_is_a_note() -> None:
    """Overhead that may run on paired CPUs is said, and is no fallback."""
    threads = [*vcpus(0, 1), main_thread()]
    found = place(sandbox(A2), threads, node())
    assert codes(found) == {"overhead-overlaps-pairs"}
    assert found.desired[threads[2].key].step == ""


def test_disputed_overhead_takes_the_whole_mask() -> None:
    """A thread of another role whose sources disagree goes to the mask, or is left alone."""
    one = thread(IOTHREAD, 1001, conflict="QMP and name disagree")
    found = place(sandbox(A2, S), [one], node())
    assert applied(found, [one]) == {"iothread": "2-5"}
    left = place(sandbox(A2, S), [one], node(settings=settings("auto", iothread="leave")))
    assert left.desired == {}
