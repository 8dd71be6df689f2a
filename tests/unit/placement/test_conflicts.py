"""Exclusive pCPUs that others claim."""

from __future__ import annotations

from kata_pin.base.placement import Placement, SandboxMask
from kata_pin.placement.masks import conflicts
from tests.support.world import cpus


def claiming(**exclusive: str) -> dict[str, Placement]:
    """Return placements by sandbox with these exclusive CPUs."""
    return {
        name: Placement(name, SandboxMask(cpus(text), exclusive=cpus(text)))
        for name, text in exclusive.items()
    }


def test_no_conflict() -> None:
    """Sandboxes with CPUs of their own do not conflict; one without a mask neither."""
    placements = claiming(p="4-5", q="6-7") | {"r": Placement("r", SandboxMask(None))}
    assert conflicts(placements) == ()


def test_two_and_three_claimants() -> None:
    """Each set of claimants is one conflict with all its CPUs."""
    found = conflicts(claiming(q="5-7", p="4-6", r="6"))
    assert [(str(one.cpus), one.sandboxes) for one in found] == [
        ("5", ("p", "q")),
        ("6", ("p", "q", "r")),
    ]
