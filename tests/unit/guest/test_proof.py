"""Whether CPU time speaks against a cpuset."""

from __future__ import annotations

import pytest

from kata_pin.guest.map import Used, runs_elsewhere
from tests.support.world import cpus


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        pytest.param(Used(2.0, (0, 1.5, 0.5)), False, id="v1: inside"),
        pytest.param(Used(2.0, (0.02, 1.5, 0.48)), False, id="v1: a few ticks before it was set"),
        pytest.param(Used(2.0, (0.5, 1.5, 0)), True, id="v1: outside"),
        pytest.param(Used(0.01, (0.01, 0, 0)), None, id="v1: idle"),
        pytest.param(Used(2.0, (), 2.0), False, id="v2: as long as its threads were ready"),
        pytest.param(Used(2.0, (), 2.6), False, id="v2: others ran there too"),
        pytest.param(Used(2.0, (), 1.95), False, id="v2: within what is counted late"),
        pytest.param(Used(2.0, (), 0.4), True, id="v2: longer than its threads were ready"),
        pytest.param(Used(0.05, (), 0.0), None, id="v2: idle"),
        pytest.param(Used(2.0, (), None), None, id="v2: threads not known"),
    ],
)
def test_runs_elsewhere(used: Used, expected: bool | None) -> None:
    """Each case by its name, for guest CPUs 1 and 2."""
    assert runs_elsewhere(used, cpus("1-2")) is expected
