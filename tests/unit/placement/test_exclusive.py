"""Exclusive or not (D9): each source, and their order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.placement import KubeletState, Node
from kata_pin.base.sandbox import Container
from kata_pin.base.settings import ExclusiveMode, PlacementSettings
from kata_pin.base.values import Provenance
from kata_pin.peers.kubelet.checkpoint import parse_checkpoint
from kata_pin.placement.exclusive import exclusive_claims, pooled
from kata_pin.placement.masks import sandbox_mask
from tests.support.world import cpus, exclusive, flat, kubelet, pause, sandbox, shared

DATA = Path(__file__).resolve().parents[2] / "data"


def at(
    mode: ExclusiveMode = ExclusiveMode.AUTO,
    checkpoint: KubeletState | None = None,
    handlers: dict[str, ExclusiveMode] | None = None,
) -> Node:
    """Return a node with these answers."""
    settings = PlacementSettings(exclusive=mode, exclusive_handlers=handlers or {})
    return Node(topology=flat(512), settings=settings, kubelet=checkpoint)


def one(
    container: Container,
    node: Node | None = None,
    *others: Container,
    allocated: dict[str, CpuSet] | None = None,
) -> tuple[str, Provenance]:
    """Return the exclusive CPUs and the provenance for the first container."""
    found = exclusive_claims((container, *others), node or at(), "kata", allocated=allocated)[0]
    assert found.container_id == container.id
    assert found.reason
    return str(found.exclusive), found.provenance


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        pytest.param("/kubepods/burstable/podabc/c1", True, id="cgroupfs burstable"),
        pytest.param("/kubepods/besteffort/podabc/c1", True, id="cgroupfs besteffort"),
        pytest.param("/kubepods/podabc/c1", False, id="cgroupfs guaranteed"),
        pytest.param("/kubelet/kubepods/burstable/podabc/c1", True, id="cgroupfs under a root"),
        pytest.param("kubepods-burstable-podabc.slice:cri-containerd:c1", True, id="systemd"),
        pytest.param("kubepods-besteffort-podabc.slice:crio:c1", True, id="systemd besteffort"),
        pytest.param("kubepods-podabc.slice:cri-containerd:c1", False, id="systemd guaranteed"),
        pytest.param("kubelet-kubepods-burstable-podabc.slice:crio:c", True, id="systemd, a root"),
        pytest.param(
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podabc.slice/c1",
            True,
            id="systemd, written as a path",
        ),
        pytest.param("/kubepods/podabc/burstable", False, id="a container called burstable"),
        pytest.param("kubepods-podabc.slice:crio:kubepods-burstable-x", False, id="a name lies"),
        pytest.param("machine.slice:kata:p1", False, id="podman"),
        pytest.param("", False, id="no path"),
    ],
)
def test_pooled_paths(path: str, expected: bool) -> None:
    """The kubelet's QoS groups are recognised for both cgroup drivers, and nothing else is."""
    assert pooled(path) is expected


BURSTABLE = "/kubepods/burstable/podabc/c1"


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        pytest.param(exclusive("a", "4-5"), "4-5", id="quota of the size"),
        pytest.param(
            replace(shared("a", "4-5"), quota_us=200_000), "4-5", id="default period of 100 ms"
        ),
        pytest.param(
            replace(shared("a", "4-5"), quota_us=100_000, period_us=50_000),
            "4-5",
            id="another period",
        ),
        pytest.param(
            replace(shared("a", "4-5"), quota_us=199_999, period_us=100_000), "", id="quota near"
        ),
        pytest.param(
            replace(shared("a", "4-5"), quota_us=400_000, period_us=100_000), "", id="quota larger"
        ),
        pytest.param(
            replace(shared("a", "4-5"), quota_us=100_000, period_us=100_000, shares=2048),
            "",
            id="a wrong quota is not healed by shares",
        ),
        pytest.param(
            replace(shared("a", "4-5"), quota_us=-1, shares=2048), "4-5", id="no quota, shares"
        ),
        pytest.param(
            replace(shared("a", "4-5"), quota_us=0, shares=2048), "4-5", id="quota 0, shares"
        ),
        pytest.param(replace(shared("a", "4-5"), shares=2048), "4-5", id="quota absent, shares"),
        pytest.param(replace(shared("a", "4-5"), shares=2047), "", id="shares near"),
        pytest.param(shared("a", "4-5"), "", id="neither quota nor shares"),
        pytest.param(
            replace(shared("a", "0-299"), shares=262_144), "0-299", id="shares at their ceiling"
        ),
        pytest.param(
            replace(exclusive("a", "4-5"), cgroups_path=BURSTABLE), "", id="burstable pod"
        ),
        pytest.param(
            replace(exclusive("a", "4-5"), cgroups_path="/kubepods/podabc/c1"),
            "4-5",
            id="guaranteed pod",
        ),
    ],
)
def test_inferred(container: Container, expected: str) -> None:
    """The last source: cgroup path, and quota or shares of exactly the cpuset's size."""
    found, provenance = one(container)
    assert found == expected
    assert provenance is (Provenance.INFERRED if expected else Provenance.NONE)


@pytest.mark.parametrize("empty", [None, ""], ids=["no cpuset", "empty cpuset"])
def test_no_cpuset_is_never_exclusive(empty: str | None) -> None:
    """Without a cpuset there is nothing to be exclusive, whatever quota and sources say."""
    container = replace(shared("a", empty), quota_us=0, shares=0)
    node = at(ExclusiveMode.ALWAYS, kubelet({"a": "4-5"}))
    assert one(container, node, allocated={"a": cpus("4-5")}) == ("", Provenance.NONE)


def test_pause_is_never_exclusive() -> None:
    """No source can make the pod sandbox's own cpuset exclusive."""
    container = replace(pause("4-5"), quota_us=200_000, period_us=100_000)
    node = at(ExclusiveMode.ALWAYS, kubelet({"pause": "4-5"}, pod="4-5"))
    assert one(container, node, allocated={"pause": cpus("4-5")}) == ("", Provenance.NONE)


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        pytest.param(kubelet({"a": "4-5"}), ("4-5", Provenance.KUBELET), id="an entry"),
        pytest.param(kubelet({"b": "4-5"}), ("", Provenance.KUBELET), id="no entry: shared"),
        pytest.param(
            kubelet(pod="4-7"), ("4-5", Provenance.KUBELET), id="pod-level CPUs, what it has"
        ),
        pytest.param(
            kubelet({"a": "4"}, pod="4-7"),
            ("4", Provenance.KUBELET),
            id="own entry before the pod's",
        ),
        pytest.param(
            kubelet({"a": "5-6"}), ("5", Provenance.KUBELET), id="never beyond the cpuset"
        ),
        pytest.param(kubelet({"a": "8-9"}), ("", Provenance.KUBELET), id="beside the cpuset"),
        pytest.param(
            replace(kubelet({"a": "4"}), policy="none"),
            ("4-5", Provenance.INFERRED),
            id="a checkpoint that is not static does not answer",
        ),
        pytest.param(
            replace(kubelet(), entries={"other": {"a": cpus("4-5")}}),
            ("", Provenance.KUBELET),
            id="another pod's container of the same name",
        ),
    ],
)
def test_kubelet(checkpoint: KubeletState, expected: tuple[str, Provenance]) -> None:
    """A static checkpoint answers yes and no, by pod uid and container name."""
    assert one(exclusive("a", "4-5"), at(checkpoint=checkpoint)) == expected


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param({"a": "4-5"}, id="no entries for those that share"),
        pytest.param({"a": "4-5", "b": "6-7", "c": "6-7"}, id="an entry for each, as kubelet 1.37"),
    ],
)
def test_pod_level_cpus_are_shared_by_the_pods_containers(entries: dict[str, str]) -> None:
    """They are exclusive to no container while two containers use the same ones."""
    every = (shared("a", "4-5"), shared("b", "6-7"), shared("c", "6-7"))
    node = at(checkpoint=kubelet(entries, pod="4-7"))
    assert [str(claim.exclusive) for claim in exclusive_claims(every, node, "")] == ["4-5", "", ""]
    mask = sandbox_mask(sandbox(*every), node)
    assert (mask.exclusive, mask.shared) == (cpus("4-5"), cpus("6-7"))
    alone = exclusive_claims(every[:2], node, "")
    assert [str(claim.exclusive) for claim in alone] == ["4-5", "6-7"]


ROWS = json.loads((DATA / "kubelet" / "kubelet_checkpoints.json").read_text())["checkpoints"]


@pytest.mark.parametrize(
    ("pod", "cpusets", "expected"),
    [
        ("1", {"a": "1,33"}, {"a": "1,33"}),
        (
            "2",
            {"s": "2", "a": "3,35", "b": "4,34,36", "c": "4,34,36"},
            {"s": "2", "a": "3,35", "b": "", "c": ""},
        ),
        ("3", {"a": "5-6,37", "b": "38"}, {"a": "5-6,37", "b": "38"}),
        ("4", {"a": "7,39", "b": "7,39"}, {"a": "", "b": ""}),
        ("5", {"a": "1-4"}, {"a": "1-4"}),
        ("5", {"a": "1-2"}, {"a": "1-2"}),
    ],
    ids=["no pod level", "some own", "one shares alone", "all share", "grown", "growing"],
)
def test_checkpoints_of_kubelet_1_37(
    pod: str, cpusets: dict[str, str], expected: dict[str, str]
) -> None:
    """Pod entries and baselines, as the real one writes them; containers that share have none."""
    row = ROWS[-1] if pod == "5" else ROWS[-2]
    state = parse_checkpoint(row["file"].encode())
    uid = f"11111111-aaaa-4000-8000-00000000000{pod}"
    every = [replace(shared(name, text), pod_uid=uid) for name, text in cpusets.items()]
    claims = exclusive_claims(every, at(checkpoint=state), "")
    found = {one.name: str(claim.exclusive) for one, claim in zip(every, claims, strict=True)}
    assert found == expected
    assert {claim.provenance for claim in claims} == {Provenance.KUBELET}


@pytest.mark.parametrize("lost", ["pod_uid", "name"])
def test_kubelet_needs_identity(lost: str) -> None:
    """A container without pod uid or name is not the kubelet's to answer for."""
    container = exclusive("a", "4-5")
    container = replace(container, pod_uid="") if lost == "pod_uid" else replace(container, name="")
    assert one(container, at(checkpoint=kubelet())) == ("4-5", Provenance.INFERRED)


def test_always_takes_disjoint_cpusets() -> None:
    """`always` makes a cpuset exclusive that no other container touches."""
    found = one(shared("a", "4-5"), at(ExclusiveMode.ALWAYS), shared("b", "6-7"), pause("4-7"))
    assert found == ("4-5", Provenance.ADMINISTRATOR)


def test_always_refuses_overlap() -> None:
    """`always` answers no where cpusets overlap, even if inference would say yes."""
    found = one(exclusive("a", "4-5"), at(ExclusiveMode.ALWAYS), shared("b", "5-7"))
    assert found == ("", Provenance.ADMINISTRATOR)


def test_never_silences_inference() -> None:
    """`never` answers no before inference is asked."""
    found = one(exclusive("a", "4-5"), at(ExclusiveMode.NEVER))
    assert found == ("", Provenance.ADMINISTRATOR)


def test_handler_setting_beats_the_general_one() -> None:
    """The setting of the container's own handler counts, else of the one given."""
    handlers = {"kata": ExclusiveMode.NEVER, "kata-rt": ExclusiveMode.ALWAYS}
    node = at(ExclusiveMode.AUTO, handlers=handlers)
    assert one(exclusive("a", "4-5"), node) == ("", Provenance.ADMINISTRATOR)
    own = replace(shared("a", "4-5"), handler="kata-rt")
    assert one(own, node) == ("4-5", Provenance.ADMINISTRATOR)


@pytest.mark.parametrize(
    ("mode", "checkpoint", "allocated", "expected"),
    [
        pytest.param(
            ExclusiveMode.NEVER,
            kubelet({"a": "4"}),
            {"a": cpus("5")},
            ("5", Provenance.ALLOCATOR),
            id="allocator first",
        ),
        pytest.param(
            ExclusiveMode.ALWAYS,
            kubelet({"a": "4"}),
            {"a": EMPTY},
            ("", Provenance.ALLOCATOR),
            id="the allocator's no is an answer",
        ),
        pytest.param(
            ExclusiveMode.ALWAYS,
            kubelet({"a": "4"}),
            {"b": cpus("5")},
            ("4", Provenance.KUBELET),
            id="an allocator that does not know it is silent",
        ),
        pytest.param(
            ExclusiveMode.NEVER,
            kubelet({"a": "4"}),
            {},
            ("4", Provenance.KUBELET),
            id="kubelet before the administrator's never",
        ),
        pytest.param(
            ExclusiveMode.ALWAYS,
            kubelet(),
            {},
            ("", Provenance.KUBELET),
            id="kubelet before the administrator's always",
        ),
        pytest.param(
            ExclusiveMode.NEVER, None, {}, ("", Provenance.ADMINISTRATOR), id="then never"
        ),
        pytest.param(
            ExclusiveMode.AUTO, None, {}, ("4-5", Provenance.INFERRED), id="then inference"
        ),
    ],
)
def test_order_of_sources(
    mode: ExclusiveMode,
    checkpoint: KubeletState | None,
    allocated: dict[str, CpuSet],
    expected: tuple[str, Provenance],
) -> None:
    """The first source that answers, yes or no, is the one believed."""
    assert one(exclusive("a", "4-5"), at(mode, checkpoint), allocated=allocated) == expected
