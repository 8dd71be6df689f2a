"""Nodes and folders that many of these tests begin with."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Node, private_node
from tests.support.katalike import KataDirs


@pytest.fixture
def node() -> Iterator[Node]:
    """A node of the test's own, with default settings."""
    with private_node() as one:
        yield one


@pytest.fixture
def dirs() -> Iterator[KataDirs]:
    """Kata's directories, private and short."""
    root = Path(tempfile.mkdtemp(prefix="kp"))
    yield KataDirs.below(root)
    shutil.rmtree(root)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    path = Path(tempfile.mkdtemp(prefix="cd"))
    yield path
    shutil.rmtree(path)
