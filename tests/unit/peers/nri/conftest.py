"""A runtime that is played at a socket."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.nriruntime import Runtime


@pytest.fixture
def path() -> Iterator[Path]:
    """Where the runtime listens: a short path."""
    with tempfile.TemporaryDirectory(prefix="kp") as folder:
        yield Path(folder) / "nri.sock"


@pytest.fixture
async def runtime(path: Path) -> AsyncIterator[Runtime]:
    """A runtime that listens."""
    async with Runtime(path) as one:
        yield one
