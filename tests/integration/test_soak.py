"""A little churn leaves nothing behind; `scripts/bench soak` has it for as long as wanted."""

from __future__ import annotations

import pytest

from kata_pin.rights.client import MAX_READERS
from tests.bench.node import BenchNode
from tests.bench.soak import HISTORY_ROWS, soak

LIVING = 6
"""Few, so that a busy machine ends many of them in time."""

EARLY_MIB = 8.0
"""Python's own heap still settles at first; twenty of them are judged by the bench."""


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_churn_leaves_nothing_behind() -> None:
    """Descriptors, watches and rows are as before the first sandbox; memory has settled.

    Of the broker's readers, which are kept, there are as many as are allowed at most.
    """
    with BenchNode() as node:
        done = soak(node, 35, living=LIVING)
    assert done.after.churned > 2 * LIVING
    assert max(sample.living for sample in done.during) == LIVING
    assert done.during[-1].watches > done.before.watches
    assert done.after.descriptors == done.before.descriptors
    assert done.after.readers <= MAX_READERS + 1  # one more for system calls
    assert done.after.watches == done.before.watches
    assert done.rows_left == 0
    assert done.after.rows["history"] <= HISTORY_ROWS
    assert done.memory_grown_mib < EARLY_MIB
