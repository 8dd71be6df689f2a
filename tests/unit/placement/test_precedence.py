"""Which source is believed about a cpuset."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.placement import KubeletState
from kata_pin.base.sandbox import Container, ReportedCpuset
from kata_pin.base.values import ContainerState, CpusetSource
from kata_pin.placement.masks import LIVE, SOURCES, believed, is_stale, resolve_cpusets, why
from tests.support import world
from tests.support.world import cpus

NRI, KATA, BUNDLE = CpusetSource.NRI, CpusetSource.KATA, CpusetSource.BUNDLE
KUBELET, CGROUP = CpusetSource.KUBELET, CpusetSource.CGROUP


def told(source: CpusetSource, text: str | None, recorded_ns: int = 0) -> ReportedCpuset:
    return ReportedCpuset(source, None if text is None else cpus(text), recorded_ns)


ROWS = {
    "nothing": ((), None, "no source reports it"),
    "one": ((told(BUNDLE, "1", 5),), BUNDLE, "only config.json reports it"),
    "a live one above a bundle that came later": (
        (told(BUNDLE, "1", 9), told(KATA, "2", 5)),
        KATA,
        "persist.json reports the current value",
    ),
    "that it has none is a value too": (
        (told(BUNDLE, "1", 9), told(NRI, None, 5)),
        NRI,
        "NRI reports the current value",
    ),
    "the live one that changed last": (
        (told(NRI, "1", 9), told(KATA, "2", 5), told(BUNDLE, "3", 99)),
        NRI,
        "NRI changed most recently",
    ),
    "the same the other way round": (
        (told(NRI, "1", 5), told(KATA, "2", 9)),
        KATA,
        "persist.json changed most recently",
    ),
    "both in one moment: what the runtime has is in force": (
        (told(NRI, "1", 5), told(KATA, "2", 5)),
        KATA,
        "persist.json changed most recently",
    ),
    "all the same": (
        (told(NRI, "1", 5), told(KATA, "1", 4), told(BUNDLE, "1", 1)),
        NRI,
        "all sources agree",
    ),
    "the kubelet above the bundle": (
        (told(BUNDLE, "1", 9), told(KUBELET, "2")),
        KUBELET,
        "the kubelet's checkpoint takes precedence over config.json, which updates do not change",
    ),
    "the cgroup above the bundle": (
        (told(BUNDLE, "1", 9), told(CGROUP, "2")),
        CGROUP,
        "the sandbox's cgroup takes precedence over config.json, which updates do not change",
    ),
}


@pytest.mark.parametrize(("values", "winner", "reason"), ROWS.values(), ids=ROWS)
def test_order(
    values: tuple[ReportedCpuset, ...], winner: CpusetSource | None, reason: str
) -> None:
    """The documented order, and its words."""
    for each in (values, values[::-1]):
        one = believed(each)
        assert (one.source if one else None) is winner
        assert why(each) == reason


def stale(name: str, text: str | None, **changes: object) -> Container:
    """Return a container that only its bundle tells of."""
    one = world.shared(name, text)
    return replace(one, reported=(ReportedCpuset(BUNDLE, one.cpus, 1),), **changes)


def guaranteed(name: str, text: str) -> Container:
    one = world.exclusive(name, text)
    return replace(one, reported=(ReportedCpuset(BUNDLE, one.cpus, 1),))


def live(name: str, text: str) -> Container:
    one = world.shared(name, text)
    return replace(one, reported=(ReportedCpuset(KATA, one.cpus, 1),))


def by_union(written: str, *containers: Container) -> dict[str, str]:
    """Return what the containers have when that is written for the sandbox's cgroup."""
    found = resolve_cpusets(containers, kubelet=None, configured=cpus(written))
    return {one.id: str(one.cpus or EMPTY) for one in found}


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (stale("a", "1"), True),
        (live("a", "1"), False),
        (world.shared("a", "1"), False),  # nobody told anything: left as it is
        (replace(stale("a", "1"), state=ContainerState.STOPPED), False),
        (replace(world.pause("1"), reported=(ReportedCpuset(BUNDLE, CpuSet([1]), 1),)), False),
    ],
)
def test_who_is_stale(one: Container, expected: bool) -> None:
    """A container that counts and of which only config.json tells."""
    assert is_stale(one) is expected


UNIONS = {
    "as recorded": ("0-3", [stale("a", "0-1"), stale("b", "2-3")], {"a": "0-1", "b": "2-3"}),
    "the only container moved": ("4-5", [stale("a", "0-1")], {"a": "4-5"}),
    "it grew": ("0-5", [stale("a", "0-1")], {"a": "0-5"}),
    "it shrank": ("0", [stale("a", "0-1")], {"a": "0"}),
    "one of two moved": (
        "0-1,6-7",
        [guaranteed("a", "0-1"), stale("b", "2-3")],
        {"a": "0-1", "b": "6-7"},
    ),
    "the exclusive one was resized elsewhere": (
        "2-5",
        [guaranteed("a", "0-1"), stale("b", "2-3")],
        {"a": "4-5", "b": "2-3"},
    ),
    "the shared one grew, not the exclusive": (
        "0-5",
        [guaranteed("a", "0-1"), stale("b", "2-3")],
        {"a": "0-1", "b": "2-5"},
    ),
    "all look exclusive": (
        "0-4",
        [guaranteed("a", "0-1"), guaranteed("b", "2-3")],
        {"a": "0-1,4", "b": "2-4"},
    ),
    "a live source knows its own": (
        "0-5",
        [live("a", "0-1"), stale("b", "2")],
        {"a": "0-1", "b": "2-5"},
    ),
    "nobody had a cpuset": ("4-5", [stale("a", None)], {"a": "4-5"}),
    "one has none and keeps none": (
        "4-5",
        [stale("a", None), stale("b", "0")],
        {"a": "", "b": "4-5"},
    ),
    "what a stopped one has is still in Kata's union": (
        "0-3",
        [stale("a", "0-1"), stale("b", "2-3", state=ContainerState.STOPPED)],
        {"a": "0-1", "b": "2-3"},
    ),
    "nothing written": ("", [stale("a", "0-1")], {"a": "0-1"}),
}  # fmt: skip


@pytest.mark.parametrize(("written", "containers", "expected"), UNIONS.values(), ids=UNIONS)
def test_what_a_union_means(
    written: str, containers: list[Container], expected: dict[str, str]
) -> None:
    """The written cpuset of the sandbox's cgroup is the union; who has what is worked out."""
    assert by_union(written, *containers) == expected


def test_the_kubelets_entry_stands_above_the_union() -> None:
    """Exclusive CPUs by uid and name; what is left of the union is the other's."""
    kubelet = KubeletState("static", cpus("0-1"), entries={"uid": {"a": cpus("4-5")}})
    containers = (stale("a", "2-3"), stale("b", "0-1"))
    a, b = resolve_cpusets(containers, kubelet=kubelet, configured=cpus("0,4-5"))
    assert (a.cpus, b.cpus) == (cpus("4-5"), cpus("0"))
    assert [one.source for one in a.reported] == [BUNDLE, KUBELET]
    assert why(b.reported).startswith("the sandbox's cgroup takes precedence over")


@pytest.mark.parametrize(
    "kubelet",
    [
        None,
        KubeletState("none", cpus("0-1"), entries={"uid": {"a": cpus("4-5")}}),
        KubeletState("static", cpus("0-1"), entries={"other": {"a": cpus("4-5")}}),
        KubeletState("static", cpus("0-1"), entries={"uid": {"b": cpus("4-5")}}),
    ],
)
def test_a_checkpoint_without_an_entry_says_nothing(kubelet: KubeletState | None) -> None:
    """Another policy, pod or name."""
    (one,) = resolve_cpusets((stale("a", "2-3"),), kubelet=kubelet, configured=EMPTY)
    assert one == stale("a", "2-3")


def test_a_live_source_stands_above_the_checkpoint_and_the_union() -> None:
    """Where the runtime tells, nothing is worked out."""
    kubelet = KubeletState("static", cpus("0-1"), entries={"uid": {"a": cpus("4-5")}})
    one = live("a", "2-3")
    assert resolve_cpusets((one,), kubelet=kubelet, configured=cpus("7")) == (one,)


def test_every_source_has_its_place() -> None:
    """A new one needs its words and its place; one that reports updates is live."""
    assert set(SOURCES) == set(CpusetSource)
    assert set(CpusetSource) - {*LIVE} == {KUBELET, CGROUP, BUNDLE}
