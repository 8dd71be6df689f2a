"""The control server by itself: bounds, faults, and who is let in."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kata_pin.daemon.service.control import MAX_CLIENTS, ControlServer, Verb
from kata_pin.errors import DaemonError
from kata_pin.wire.request import Request


async def _echo(request: Request) -> bytes:
    return json.dumps(dict(request.arguments)).encode()


async def _refuse(_request: Request) -> bytes:
    raise DaemonError("not now", hint="later")


async def _break(_request: Request) -> bytes:
    raise RuntimeError("a bug")


async def _fail(_request: Request) -> bytes:
    raise OSError("no space left")


VERBS: Mapping[str, Verb] = {"echo": _echo, "refuse": _refuse, "break": _break, "fail": _fail}


@contextlib.asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[str]:
    path = str(tmp_path / "control.sock")
    async with ControlServer(path, VERBS).serving():
        yield path
    assert not (tmp_path / "control.sock").exists()


async def _ask(path: str, *verbs: str) -> list[Any]:
    reader, writer = await asyncio.open_unix_connection(path)
    for verb in verbs:
        writer.write(json.dumps({"version": 1, "verb": verb, "x": 1}).encode() + b"\n")
    replies = []
    async with asyncio.timeout(5):
        for _ in verbs:
            line = await reader.readline()
            if not line:
                break
            replies.append(json.loads(line))
    writer.close()
    await writer.wait_closed()
    return replies


async def test_a_verb_that_fails_ends_only_its_connection(tmp_path: Path) -> None:
    """A bug in a verb costs that client its connection; refusals carry text and hint."""
    async with served(tmp_path) as path:
        (refused,) = await _ask(path, "refuse")
        assert (refused["ok"], refused["error"], refused["hint"]) == (False, "not now", "later")
        assert await _ask(path, "break", "echo") == []
        assert (await _ask(path, "echo"))[0]["document"] == {"x": 1}


async def test_a_verb_that_fails_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the system in a verb is no fault of the client: the log has it."""
    async with served(tmp_path) as path:
        assert await _ask(path, "fail") == []
    assert "control client failed: no space left" in caplog.text


async def test_places_are_given_back(tmp_path: Path) -> None:
    """Clients one after the other never run out of places, however they leave."""
    async with served(tmp_path) as path:
        for _ in range(MAX_CLIENTS * 2):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(b"garbage\n")
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert (await _ask(path, "echo"))[0]["ok"]


async def test_closing_ends_talks_and_takes_the_socket_away(tmp_path: Path) -> None:
    """A client that is connected does not hold up the end; the path is free again."""
    async with served(tmp_path) as path:
        reader, writer = await asyncio.open_unix_connection(path)
        await _ask(path, "echo")
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()


async def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    """What a killed daemon left, half made or whole, is in nobody's way."""
    for name in ("control.sock", "control.sock.new"):
        (tmp_path / name).write_text("")
    async with served(tmp_path) as path:
        assert (await _ask(path, "echo"))[0]["ok"]
