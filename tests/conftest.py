"""What holds for every test; one that leaves something behind fails: see tests/support/leaks.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

pytest_plugins = ["tests.support.leaks"]


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Have programs that are started heed SIGINT: a shell's background jobs inherit it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def same_cpus() -> Iterator[None]:
    """Commands that a test runs in this process take it off exclusive pCPUs: undo that."""
    before = os.sched_getaffinity(0)
    yield
    if os.sched_getaffinity(0) != before:
        os.sched_setaffinity(0, before)
