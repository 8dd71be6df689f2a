"""What `scripts/lab test` needs beside the machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.lab.errors import EX_NOT_BUILT, NotBuiltError
from tests.lab.flavours import DEFAULT, flavour
from tests.lab.settings import Settings
from tests.lab.trial import Left, Trial, left_to_run


def test_a_kubelet_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Go, and without one from before: not run, with the reason; nothing is booted."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "dirname", "sed", "cat", "sha256sum", "cut"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trial = Trial(Settings.read(), flavour(DEFAULT), lambda _: None, tmp_path)
    with pytest.raises(NotBuiltError, match="scripts/kubelet cannot build") as raised:
        trial._script("kubelet")
    assert raised.value.exit_code == EX_NOT_BUILT


ENDED = """tests/e2e/test_a.py::test_one PASSED                 [  1%]
tests/e2e/test_a.py::test_two[x y] FAILED                 [  2%]
tests/e2e/test_b.py::test_first PASSED                    [  3%]
tests/e2e/test_b.py::test_last """


def test_what_is_left_when_the_machine_ended() -> None:
    """The file that was being run, from its beginning, and those after it; failures stay known."""
    failed = "tests/e2e/test_a.py::test_two[x y]"
    left = Left("tests/e2e/test_b.py::test_last", ["--ignore=tests/e2e/test_a.py"], [failed])
    assert left_to_run(ENDED) == left
    assert left_to_run("collecting ... ") is None
