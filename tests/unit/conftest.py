"""A daemon's real control sockets that answer with documents made by hand, and its registry."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config
from kata_pin.base.documents.answers import Names, SandboxName
from kata_pin.base.json_text import Fields
from kata_pin.cli.options import Session
from kata_pin.records.containers import Registry
from kata_pin.service.commands import ControlServer, Verb
from kata_pin.service.protocol import encode

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
        chosen = tuple(one for one in found.sandboxes if one.id == wanted)
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
