"""The sandbox mask (D8): who counts, what the parts are, where it comes from."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.placement import Node
from kata_pin.base.sandbox import Container
from kata_pin.base.settings import PlacementSettings
from kata_pin.base.values import ContainerState
from kata_pin.placement.masks import sandbox_mask
from tests.support.world import cpus, exclusive, kubelet, node, pause, sandbox, shared

STOPPED = ContainerState.STOPPED


def in_state(container: Container, state: ContainerState) -> Container:
    """Return the container in another state."""
    return replace(container, state=state)


def parts(
    *containers: Container, at: Node | None = None, pool: str = ""
) -> tuple[str | None, str, str, str]:
    """Return mask, exclusive, shared and overhead_extra as cpu lists."""
    found = sandbox_mask(sandbox(*containers), at or node(), pool=cpus(pool))
    mask = None if found.mask is None else str(found.mask)
    return mask, str(found.exclusive), str(found.shared), str(found.overhead_extra)


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        pytest.param(
            (shared("a", "4-5"), shared("b", "5-7")), ("4-7", "", "4-7", ""), id="the union"
        ),
        pytest.param(
            (exclusive("a", "4-5"), shared("b", "6-7")),
            ("4-7", "4-5", "6-7", ""),
            id="exclusive and shared split it",
        ),
        pytest.param(
            (exclusive("a", "4-5"), shared("b", "5-7")),
            ("4-7", "4-5", "6-7", ""),
            id="a CPU that is exclusive is not shared",
        ),
        pytest.param(
            (shared("a", "4"), in_state(shared("b", "5"), ContainerState.CREATED)),
            ("4-5", "", "4-5", ""),
            id="created counts",
        ),
        pytest.param(
            (shared("a", "4"), in_state(exclusive("b", "5"), STOPPED)),
            ("4", "", "4", ""),
            id="stopped does not count",
        ),
        pytest.param(
            (shared("a", "4"), shared("b", None), shared("c", "")),
            ("4", "", "4", ""),
            id="no cpuset adds nothing",
        ),
        pytest.param(
            (pause("0-5"), exclusive("a", "4-5"), shared("b", "6")),
            ("4-6", "4-5", "6", "0-3"),
            id="the pause container's is extra",
        ),
        pytest.param(
            (pause("4-5"), exclusive("a", "4-5")),
            ("4-5", "4-5", "", ""),
            id="the pause container inside the mask adds nothing",
        ),
        pytest.param((pause("0-1"),), ("0-1", "", "0-1", ""), id="only the pause container"),
        pytest.param((), (None, "", "", ""), id="no container"),
        pytest.param((shared("a", None),), (None, "", "", ""), id="no cpuset anywhere"),
        pytest.param(
            (in_state(shared("a", "4"), STOPPED),), (None, "", "", ""), id="the last one left"
        ),
    ],
)
def test_parts(
    containers: tuple[Container, ...], expected: tuple[str | None, str, str, str]
) -> None:
    """The mask is the union over counting containers, split into its parts."""
    assert parts(*containers) == expected


def test_stopped_counts_as_kata_does() -> None:
    """By the setting `kata` a stopped container counts until it is deleted."""
    at = node(settings=PlacementSettings(stopped_counts=True))
    assert parts(shared("a", "4"), in_state(exclusive("b", "5"), STOPPED), at=at) == (
        "4-5",
        "5",
        "4",
        "",
    )
    deleted = in_state(exclusive("b", "5"), ContainerState.DELETED)
    assert parts(shared("a", "4"), deleted, at=at) == ("4", "", "4", "")


@pytest.mark.parametrize(
    ("at", "pool", "expected"),
    [
        pytest.param(
            node(default="0-3"), "8-9", ("0-3", "", "0-3", "10"), id="static kubelet's default"
        ),
        pytest.param(
            replace(node(), kubelet=replace(kubelet(), policy="none")),
            "8-9",
            ("8-9", "", "8-9", "10"),
            id="a kubelet that is not static says nothing",
        ),
        pytest.param(node(), "8-9", ("8-9", "", "8-9", "10"), id="then our allocator's pool"),
        pytest.param(node(), "", ("10", "", "10", ""), id="then the pause container's own"),
    ],
)
def test_no_container_with_a_cpuset(
    at: Node, pool: str, expected: tuple[str, str, str, str]
) -> None:
    """Without a container's cpuset: kubelet default, our pool, the pause container, in order."""
    assert parts(pause("10"), shared("a", None), at=at, pool=pool) == expected


def test_a_cpuset_beats_the_kubelet_default() -> None:
    """One container with a cpuset is enough to make the mask; the default adds nothing."""
    assert parts(shared("a", "9"), shared("b", None), at=node(default="0-3"))[0] == "9"


def test_origin_and_claims_are_kept_for_explain() -> None:
    """The origin is words, and each counting container has its claim in record order."""
    found = sandbox_mask(sandbox(pause(None), exclusive("a", "4"), shared("b", "5")), node())
    assert "containers" in found.origin
    assert [claim.container_id for claim in found.claims] == ["pause", "a", "b"]
