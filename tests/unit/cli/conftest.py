"""The command line beside a daemon whose documents are made by hand, and on a host of files."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kata_pin.base.documents.measured import WatchDocument
from kata_pin.base.documents.state import DoctorDocument, Row, Sandbox, State
from tests.support.commandline import below, run
from tests.support.hosttree import grow
from tests.unit.cli import documents as docs
from tests.unit.conftest import Serve


class Commands:
    """Runs commands with settings of a file; `state` and `watch` are what the daemon answers.

    `host` is the folder where /proc, /sys and debugfs are, None for those of this machine.
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.state = docs.state()
        self.watch = WatchDocument(time="", max_foreign_percent=0.1, problem="", pcpus=())
        self.host: Path | None = None
        self._capsys = capsys

    def run(self, *arguments: str, **settings: Any) -> tuple[int, str]:
        """Return the exit status and what a command prints, which is something."""
        file = self.folder / "commands.yaml"
        given = {
            "version": 1, "runtime_dir": str(self.folder), "isolation": {"check_s": 0}, **settings
        }  # fmt: skip
        file.write_text("".join(f"{key}: {json.dumps(one)}\n" for key, one in given.items()))
        self._capsys.readouterr()
        with below(self.host) if self.host is not None else contextlib.nullcontext():
            status = run([*arguments, "--config", str(file)])
        done = self._capsys.readouterr()
        assert done.out, done.err
        return status, done.out

    def json(self, *arguments: str, **settings: Any) -> Any:
        """Return the document that a command prints."""
        return json.loads(self.run(*arguments, "--json", **settings)[1])


class Doctor(Commands):
    """Runs `kata-pin doctor --json`; a test writes the files of the host, or wants this machine."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(folder, capsys)
        self.files = folder / "host"
        self.files.mkdir()
        self.host = self.files

    def __call__(self, *arguments: str, **settings: Any) -> tuple[Row, ...]:
        """Return all rows."""
        return self.document(*arguments, **settings).rows

    def document(self, *arguments: str, **settings: Any) -> DoctorDocument:
        """Return the document, whose word `ok` is the exit status's."""
        status, out = self.run("doctor", "--json", *arguments, **settings)
        found = msgspec.json.decode(out, type=DoctorDocument)
        assert status == (0 if found.ok else 1)
        return found

    def write(self, path: str, text: str) -> None:
        """Write a file of the host."""
        grow(self.files, {path: text})

    def rows(self, check: str, **settings: Any) -> list[Row]:
        """Return the rows of one check."""
        return [row for row in self(**settings) if row.check == check]

    def row(self, check: str, **settings: Any) -> Row:
        """Return the one row of a check."""
        (found,) = self.rows(check, **settings)
        return found

    def of(self, sandbox: Sandbox, **settings: Any) -> dict[str, Row]:
        """Return the rows of a sandbox by their check; of several of one check the last."""
        self.state = docs.state(sandbox)
        return {row.check: row for row in self(sandbox.id, **settings) if row.sandbox}


def beside(serve: Serve, one: Commands) -> None:
    """Serve what `one` has for a daemon."""

    def state(_: object) -> State:
        return one.state

    serve({"state": state, "watch": lambda _: one.watch})


@pytest.fixture
def commands(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Commands:
    """Commands beside a daemon, on this machine."""
    one = Commands(tmp_path, capsys)
    beside(serve, one)
    return one


@pytest.fixture
def doctor(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """`doctor` beside a daemon without sandboxes, on a host without files."""
    one = Doctor(tmp_path, capsys)
    beside(serve, one)
    return one
