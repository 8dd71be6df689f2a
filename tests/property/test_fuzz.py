"""Each fuzz target over some thousand damaged inputs: `scripts/chaos fuzz` runs a million."""

from __future__ import annotations

import random

import pytest

from kata_pin.base.errors import ParseError
from tests.chaos.fuzz.campaign import campaign, once
from tests.chaos.fuzz.targets import TARGETS, Target

INPUTS = 4000


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_inputs(name: str) -> None:
    """No damaged input costs more than its bound or raises what the parser does not document."""
    seed = random.randrange(1 << 32)
    done = campaign(name, INPUTS, seed=seed)
    assert done.inputs == INPUTS
    assert [str(one) for one in done.findings] == [], f"seed {seed}"


def test_each_rule_can_be_broken() -> None:
    """An undocumented error and a slow input are findings; a refusal is none."""

    def refuses(_: bytes) -> None:
        raise ParseError("no")

    def fails(_: bytes) -> None:
        raise KeyError("x")

    def dawdles(_: bytes) -> None:
        sum(range(30_000_000))

    def target(run: object) -> Target:
        assert callable(run)
        return Target(run, (), lambda: [b""])

    assert once(target(refuses), b"")[0] == ""
    assert once(target(fails), b"")[0].startswith("KeyError at test_fuzz.py:fails")
    assert "more than 0.1" in once(target(dawdles), b"")[0]
