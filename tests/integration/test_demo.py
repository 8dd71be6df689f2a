"""The first command of the README does what the README says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("arguments", [[], ["--tcg"]], ids=["as detected", "without KVM"])
def test_the_demo_holds_all_its_claims(arguments: list[str]) -> None:
    """scripts/demo ends with success, says how much it read back, and names no failure."""
    done = subprocess.run(
        [ROOT / "scripts/demo", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=140,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "0 failed" in done.stdout
    assert "Nothing was left behind" in done.stdout
