""".ci/run says what the lab pass came to, and fails for failing tests only."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lab.settings import PROJECT


def _run(folder: Path, *, test: str, lab: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/run in a folder where scripts/test and scripts/lab are these lines of shell."""
    for name, script in (("test", test), ("lab", lab)):
        file = folder / "scripts" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    (folder / ".ci").mkdir()
    shutil.copy2(PROJECT / ".ci/run", folder / ".ci/run")
    return subprocess.run(
        [str(folder / ".ci/run")], capture_output=True, text=True, check=False, timeout=20
    )


def _with_results(code: int) -> str:
    folder = "build/lab/trixie-kvm"
    return f"mkdir -p {folder}; echo panic >{folder}/console.log; exit {code}"


def test_all_passed(tmp_path: Path) -> None:
    """Both passed: so does the run, and the summary has both with their times."""
    done = _run(tmp_path, test="exit 0", lab=_with_results(0))
    assert done.returncode == 0
    assert "scripts/test: passed in" in done.stdout
    assert "lab trixie-kvm: passed in" in done.stdout


def test_machine_that_does_not_come_up_is_reported_and_fails_nothing(tmp_path: Path) -> None:
    """Exit code 75 of the lab: not run, its console is shown, the run passes."""
    done = _run(tmp_path, test="exit 0", lab=_with_results(75))
    assert done.returncode == 0
    assert "lab trixie-kvm: NOT RUN" in done.stdout
    assert "panic" in done.stdout


@pytest.mark.parametrize(("test", "lab"), [(1, 0), (0, 1), (0, 130)])
def test_failures_fail_the_run(tmp_path: Path, test: int, lab: int) -> None:
    """A failing test fails the run, here or in the lab, and so does a lab that could not run."""
    done = _run(tmp_path, test=f"exit {test}", lab=_with_results(lab))
    assert done.returncode == (test or lab)
