"""The command line in this process: `run(["show", "--json"])` returns its exit status.

Tests of the command line's text and JSON import it from here and nothing else of kata_pin.cli.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import force_setattr

from kata_pin.cli.main import run
from kata_pin.linux.files import HOST

__all__ = ["below", "run"]


@contextmanager
def below(root: Path) -> Iterator[None]:
    """Have commands read the host's /proc, /sys and debugfs below a folder."""
    before = HOST.root
    force_setattr(HOST, "root", str(root))
    try:
        yield
    finally:
        force_setattr(HOST, "root", before)
