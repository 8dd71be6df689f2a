"""A daemon's real control sockets that answer with documents made by hand, and its registry.

And commands that are run beside them, on this machine or on a host of files.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config
from kata_pin.base.documents.answers import Names, SandboxName
from kata_pin.base.documents.measured import WatchDocument
from kata_pin.base.documents.state import DoctorDocument, Row, Sandbox, State
from kata_pin.base.errors import DaemonError
from kata_pin.base.json_text import Fields
from kata_pin.cli.session import Session
from kata_pin.records.containers import Registry
from kata_pin.service.commands import ControlServer, Verb
from kata_pin.service.protocol import encode
from tests.support.commandline import below, run
from tests.support.hosttree import grow
from tests.unit.cli import documents as docs

Answers = dict[str, Callable[[Fields], Any]]
Serve = Callable[[Answers], Path]


def given(config: Config) -> Session:
    """Return a session with these settings, of no file."""
    session = Session()
    session.config, session.runtime_dir = config, config.runtime_dir
    return session


def plain(document: object) -> Any:
    """Return a document as its JSON means it."""
    return json.loads(encode(document))


def _verb(answer: Callable[[Fields], Any]) -> Verb:
    async def verb(request: Fields) -> bytes:
        return encode(answer(request))

    return verb


def _whole(answers: Answers) -> Answers:
    """Return the answers with those of every daemon, and those that follow from the state."""
    answers = {"ping": lambda _: {}, **answers}
    if "state" not in answers:
        return answers

    def names(request: Fields) -> Names:
        found = answers["state"](request).sandboxes
        return Names(sandboxes=tuple(SandboxName(one.id, one.pod) for one in found))

    def state(request: Fields) -> object:
        found, wanted = answers["state"](request), request.text("sandbox")
        if not wanted:
            return found
        chosen = tuple(one for one in found.sandboxes if wanted in {one.id, one.pod})
        if not chosen:
            raise DaemonError(f"no sandbox {wanted!r}")
        return replace(found, sandboxes=chosen)

    return {"names": names, **answers, "state": state}


READING = {"names", "state", "explain", "history", "watch", "ping"}
"""What status.sock answers."""


class Sockets:
    """Serves both sockets from a thread of its own until closed."""

    def __init__(self, folder: Path, answers: Answers) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        verbs = {name: _verb(answer) for name, answer in _whole(answers).items()}
        reading = {
            n: v
            for n, v in verbs.items()
            if n in {"names", "state", "explain", "history", "watch", "ping"}
        }
        self._closing = contextlib.AsyncExitStack()
        for name, known in (("control.sock", verbs), ("status.sock", reading)):
            self._run(self._serve(ControlServer(str(folder / name), known)))

    async def _serve(self, server: ControlServer) -> None:
        await self._closing.enter_async_context(server.serving())

    def _run(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(5)

    def close(self) -> None:
        """Stop serving and end the thread."""
        self._run(self._closing.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that serves answers and gives the configuration file to reach them."""
    running: list[Sockets] = []

    def start(answers: Answers) -> Path:
        running.append(Sockets(tmp_path, answers))
        config = tmp_path / "config.yaml"
        config.write_text(f"version: 1\nruntime_dir: {tmp_path}\nisolation: {{check_s: 0}}\n")
        return config

    yield start
    for sockets in running:
        sockets.close()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """An empty registry's file."""
    one = Registry(str(tmp_path / "registry.db"), boot_id="b")
    yield one
    one.close()


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
        """Return the document; a row that fails is told by its `ok` and the exit status."""
        status, out = self.run("doctor", "--json", *arguments, **settings)
        found = msgspec.json.decode(out, type=DoctorDocument)
        assert found.ok == all(row.status != "fail" for row in found.rows)
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
