"""What a sandbox takes of the daemon's memory: the bench's bars, which do not depend on speed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.bench.memory import LIVING, STAYS


@pytest.mark.timeout(180)
def test_a_sandbox_of_21_threads_fits_its_bar() -> None:
    """Also once it has ended: next to nothing stays. A process of its own, which keeps no log."""
    bench = [sys.executable, "-m", "tests.bench", "memory", "--quick", "--json"]
    done = subprocess.run(bench, capture_output=True, check=True, text=True, timeout=170)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert {name: rows[name]["held"] for name in (LIVING, STAYS)} == {LIVING: True, STAYS: True}, (
        done.stdout
    )
