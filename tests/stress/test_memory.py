"""Inputs made to exhaust memory: with none of them does the process grow beyond its ceiling."""

from __future__ import annotations

import pytest

from tests.support.memory_attacks import CEILING_MIB, figures


@pytest.mark.parametrize(
    "group",
    [
        "toml",
        "persist",
        "state",
        "checkpoint",
        "pod-list",
        "request",
        "agent",
        "cgroup",
        "command-line",
        "cpu-list",
        "overrides",
        "unix-sockets",
        "yaml",
        "qmp",
        "nri",
        "ttrpc",
    ],
)
@pytest.mark.timeout(360)  # an NRI runtime that floods waits, with little CPU time used
def test_the_process_stays_small(group: str) -> None:
    """RSS is measured in a process that has loaded what the daemon has, with the real parser."""
    measured = figures(group)
    assert measured
    assert [one for one in measured if one.peak > CEILING_MIB] == []
