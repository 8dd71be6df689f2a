"""What the benchmark leaves of this process when a daemon has run in it."""

from __future__ import annotations

import os

import pytest

from tests.bench.service import our_cpus_kept


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_daemon_in_this_process_confines_nothing_that_follows() -> None:
    """Whatever it moves its process to, the next part of the benchmark has all CPUs again."""
    before = os.sched_getaffinity(0)
    with our_cpus_kept():
        os.sched_setaffinity(0, {min(before)})
    assert os.sched_getaffinity(0) == before
