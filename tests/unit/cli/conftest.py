"""`doctor` over documents of a daemon, settings of a file, and a host that is made of files."""

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


class Doctor:
    """Runs `kata-pin doctor --json`; `state` and `watch` are what the daemon answers.

    `host` is where /proc, /sys and debugfs are: an empty folder, into which a test writes, unless
    it wants those of this machine (`live`).
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.state = docs.state()
        self.watch = WatchDocument(time="", max_foreign_percent=0.1, problem="", pcpus=())
        self.host = folder / "host"
        self.host.mkdir()
        self.live = False
        self._capsys = capsys

    def __call__(self, *arguments: str, **settings: Any) -> tuple[Row, ...]:
        """Return all rows."""
        return self.document(*arguments, **settings).rows

    def document(self, *arguments: str, **settings: Any) -> DoctorDocument:
        """Return the document, whose word `ok` is the exit status's."""
        file = self.folder / "doctor.yaml"
        given = {"version": 1, "runtime_dir": str(self.folder), **settings}
        file.write_text("".join(f"{key}: {json.dumps(one)}\n" for key, one in given.items()))
        self._capsys.readouterr()
        with contextlib.nullcontext() if self.live else below(self.host):
            status = run(["doctor", "--json", "--config", str(file), *arguments])
        done = self._capsys.readouterr()
        assert done.out, done.err
        found = msgspec.json.decode(done.out, type=DoctorDocument)
        assert status == (0 if found.ok else 1)
        return found

    def write(self, path: str, text: str) -> None:
        """Write a file of the host."""
        grow(self.host, {path: text})

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


@pytest.fixture
def doctor(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """`doctor` beside a daemon without sandboxes."""
    one = Doctor(tmp_path, capsys)

    def state(_: object) -> State:
        return one.state

    serve({"state": state, "watch": lambda _: one.watch})
    return one
