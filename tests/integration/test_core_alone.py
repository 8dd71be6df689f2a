"""The core's tests pass where the room of every option is removed from a copy of the package."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.core_alone import make_core

pytestmark = [pytest.mark.root, pytest.mark.qemu, pytest.mark.timeout(900)]

CORE: Final = ("bind", "cpusets", "first_pass", "flow")
"""Integration tests of the core, each test_daemon_*.py."""


@pytest.fixture
def core() -> Iterator[tuple[Path, Path]]:
    """The copy and its Python, in a folder that the daemon's user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="core-"))
    try:
        yield folder, make_core(folder)
    finally:
        shutil.rmtree(folder)


def test_the_core_alone(core: tuple[Path, Path]) -> None:
    """Hooks, passes, drift, starts, the registry, documents, and undo."""
    folder, python = core
    files = [f"tests/integration/test_daemon_{name}.py" for name in CORE]
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-n", "0", "-p", "tests.support.core_alone",
         "-p", "no:cacheprovider", *files],
        cwd=folder, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
