"""A captured tree says of a host what the host says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kata_pin.linux.files import HOST
from kata_pin.linux.topology import read_topology
from tests.support.hosttree import grow, parse_listing

CAPTURE = Path(__file__).parents[2] / "scripts" / "capture-host"


def test_captured_topology_is_the_host_s(tmp_path: Path) -> None:
    """Nothing that the topology is read from is left out."""
    captured = subprocess.run(
        [sys.executable, str(CAPTURE)], capture_output=True, text=True, check=True
    )
    root = grow(tmp_path, parse_listing(captured.stdout))
    assert read_topology(root) == read_topology(HOST)
    assert read_topology(root).distances == read_topology(HOST).distances
