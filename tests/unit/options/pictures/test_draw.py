"""`draw`: on a terminal, into files, and what it says where a file cannot be written."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest

from tests.support.commandline import run
from tests.unit.cli import documents as docs
from tests.unit.conftest import Serve, plain

STATE = docs.state(docs.database())
STILL = ("--for", "0s")


@pytest.fixture
def config(serve: Serve) -> str:
    """Return the settings of a daemon that answers with a state."""
    return str(serve({"state": lambda _: deepcopy(STATE)}))


def test_draw_prints_boxes(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each pCPU with its owner's key, and what keys stand for."""
    assert run(["draw", *STILL, "--config", config]) == 0
    out = capsys.readouterr().out
    assert "NUMA node 1" in out
    assert "A    default/db-0" in out


def test_draw_writes_files(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both at once if asked for, and nothing on stdout."""
    picture, page = tmp_path / "node.svg", tmp_path / "node.html"
    assert (
        run(["draw", *STILL, "--svg", str(picture), "--html", str(page), "--config", config]) == 0
    )
    assert capsys.readouterr().out == ""
    assert picture.read_text().startswith("<svg xmlns=")
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert run(["draw", *STILL, "--svg", "-", "--config", config]) == 0
    assert capsys.readouterr().out == picture.read_text()


def test_draw_names_a_file_that_cannot_be_written(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And why."""
    missing = tmp_path / "no" / "node.svg"
    assert run(["draw", *STILL, "--svg", str(missing), "--config", config]) == 1
    wrong = capsys.readouterr().err
    assert wrong == f"kata-pin: cannot write {missing}: No such file or directory\n"
    assert run(["draw", *STILL, "--svg", "/dev/full", "--config", config]) == 1
    wrong = capsys.readouterr().err
    assert wrong == "kata-pin: cannot write /dev/full: No space left on device\n"


def test_draw_as_json_is_the_state(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is drawn is what `show --json` prints."""
    assert run(["draw", "--json", "--config", config]) == 0
    assert json.loads(capsys.readouterr().out) == plain(STATE)
