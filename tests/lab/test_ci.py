""".ci/run says what the lab pass came to, and fails for failing tests only."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lab.settings import PROJECT


def _run(folder: Path, *, test: str, lab: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/run in a folder where scripts/test and scripts/lab are these lines of bash."""
    for name, script in (("test", test), ("lab", lab)):
        file = folder / "scripts" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)
    (folder / ".ci").mkdir()
    for name in (".ci/run", "scripts/stages"):
        shutil.copy2(PROJECT / name, folder / name)
    return subprocess.run(
        [str(folder / ".ci/run")], capture_output=True, text=True, check=False, timeout=20
    )


def _with_results(code: int) -> str:
    folder = "build/lab/trixie-kvm"
    return f"mkdir -p {folder}; echo panic >{folder}/console.log; exit {code}"


def _stages(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines of the summary."""
    return done.stdout.rpartition("== summary\n")[2].splitlines()


def test_all_passed(tmp_path: Path) -> None:
    """Both passed: so does the run, and the summary has the stages of both with what they cost."""
    done = _run(
        tmp_path,
        test='. scripts/stages; stage "pure tests" sh -c "echo SKIPPED [1] a_test.py: no Go"',
        lab=_with_results(0),
    )
    assert done.returncode == 0
    tests, lab, *not_run = _stages(done)
    assert re.fullmatch(r"pure tests +0 s 0 s user 0 s system  passed", tests)
    assert re.fullmatch(r"lab trixie-kvm +0 s 0 s user 0 s system  passed", lab)
    assert not_run == ["not run:", "SKIPPED [1] a_test.py: no Go"]


def test_machine_that_does_not_come_up_is_reported_and_fails_nothing(tmp_path: Path) -> None:
    """Exit code 75 of the lab: not run, its console is shown, the run passes."""
    done = _run(tmp_path, test="exit 0", lab=_with_results(75))
    assert done.returncode == 0
    assert [line.split()[-2:] for line in _stages(done)] == [["NOT", "RUN"]]
    assert "panic" in done.stdout


@pytest.mark.parametrize("code", [0, 1])
def test_a_machine_that_ended_is_named(tmp_path: Path, code: int) -> None:
    """Another one went on: the summary says so if all passed there."""
    ended = "the machine ended during tests/e2e/test_a.py::test_b[c d]"
    done = _run(tmp_path, test="exit 0", lab=f"echo 'lab: {ended}'; exit {code}")
    assert done.returncode == code
    assert (f"{ended}; another one went on" in _stages(done)) is (code == 0)


@pytest.mark.parametrize(("test", "lab"), [(1, 0), (0, 1), (0, 130)])
def test_failures_fail_the_run(tmp_path: Path, test: int, lab: int) -> None:
    """A failing test fails the run, here or in the lab, and so does a lab that could not run."""
    done = _run(tmp_path, test=f"exit {test}", lab=_with_results(lab))
    assert done.returncode == 1
    assert ("FAILED" in done.stdout) == bool(lab)


def test_a_failing_stage_fails_and_the_next_one_still_runs(tmp_path: Path) -> None:
    """All that is wrong is known after one run."""
    stages = '. scripts/stages; stage "types" false; stage "tests" true; summary'
    done = _run(tmp_path, test=stages, lab=_with_results(0))
    assert done.returncode == 1
    assert [line.split()[0] for line in _stages(done)] == ["types", "tests"]
    assert re.search(r"types +0 s 0 s user 0 s system  FAILED with exit code 1\n", done.stdout)


@pytest.mark.parametrize(("seen", "code"), [("PASSED", 0), ("FAILED", 1)])
def test_a_lab_without_time_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str, code: int
) -> None:
    """It is ended, and the summary says how much has run; a test that failed before still fails."""
    monkeypatch.setenv("LAB_UNTIL", "2")
    lab = f"echo 'tests/e2e/test_a.py::test_b {seen} [  9%]'; sleep 15"
    done = _run(tmp_path, test="exit 0", lab=lab)
    assert done.returncode == code
    reported = "no time for all of them; 1 passed, none failed" in _stages(done)[-1]
    assert reported is (code == 0)


FAILS = """. scripts/stages
suite() {{ echo "FAILED tests/a_test.py::test_b[of two CPUs] - Late: by 1 s"; return {code}; }}
alone() {{ echo "ran: $1"; return {second}; }}
both() {{ suite || again $? alone; }}
stage processes both
summary
"""


def test_a_test_that_fails_runs_again_and_is_named(tmp_path: Path) -> None:
    """One that passes then fails nothing, but the summary has its name, which may have spaces."""
    done = _run(tmp_path, test=FAILS.format(code=1, second=0), lab="exit 0")
    assert done.returncode == 0
    name = "tests/a_test.py::test_b[of two CPUs]"
    assert f"ran: {name}" in done.stdout
    assert _stages(done)[-2:] == ["failed, and passed when run again alone:", name]


@pytest.mark.parametrize(("code", "second"), [(1, 1), (2, 0)])
def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path, code: int, second: int) -> None:
    """So does whatever is no failed test: a run that could not go on."""
    done = _run(tmp_path, test=FAILS.format(code=code, second=second), lab="exit 0")
    assert done.returncode == 1
    assert "passed when run again" not in done.stdout


def test_only_ci_runs_a_test_again(tmp_path: Path) -> None:
    """scripts/test by hand fails at once."""
    done = _run(tmp_path, test=f"unset AGAIN\n{FAILS.format(code=1, second=0)}", lab="exit 0")
    assert done.returncode == 1
    assert "ran:" not in done.stdout
