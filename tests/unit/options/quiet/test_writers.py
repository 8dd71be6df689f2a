"""Who may have written a value: programs that run and write such values, and nobody else."""

from __future__ import annotations

import pytest

from kata_pin.options.quiet.keeper import Writers, suspects
from kata_pin.options.quiet.values import Crio, Tuned, Unknown
from kata_pin.rights.broker.tunables import TunableKind

EVERY = Writers((812,), Tuned(900, "cpu-partitioning", True), Crio(1000, ("/etc/crio/x.conf",)))
IDLE = Writers((), Tuned(900, "balanced", False), Crio(1000, ()))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            TunableKind.INTERRUPT,
            ["irqbalance (pid 812)", "tuned (pid 900, profile cpu-partitioning)"],
        ),
        (TunableKind.DEFAULT_MASK, ["tuned (pid 900", "CRI-O's hooks (pid 1000)"]),
        (TunableKind.GOVERNOR, ["tuned (pid 900", "CRI-O's hooks (pid 1000)"]),
        (TunableKind.WORKQUEUES, ["tuned (pid 900"]),
    ],
)
def test_programs_that_write_such_values(kind: TunableKind, names: list[str]) -> None:
    """By kind; the text says that the kernel records no writer."""
    found = suspects(kind, EVERY)
    assert found.startswith("perhaps ")
    assert found.endswith("the kernel records no writer")
    for program in ("irqbalance", "tuned", "CRI-O"):
        assert (program in found) is any(program in one for one in names)
    assert all(one in found for one in names)


@pytest.mark.parametrize("kind", [TunableKind.INTERRUPT, TunableKind.DEFAULT_MASK, TunableKind.RPS])
def test_programs_that_do_not(kind: TunableKind) -> None:
    """tuned without isolated cores, and CRI-O without its hooks, write no masks."""
    assert "no program runs here that is known to write it" in suspects(kind, IDLE)
    hidden = Writers((), Unknown("hidepid"), Unknown("hidepid"))
    assert "no program" in suspects(kind, hidden)


def test_a_profile_that_cannot_be_read() -> None:
    """tuned is named then: its profile may have isolated cores."""
    found = Writers((), Tuned(900, Unknown("Permission denied"), False), None)
    assert "tuned (pid 900)" in suspects(TunableKind.INTERRUPT, found)
