"""Which programs that start are looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.engine.counters import Counters
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.follow import threads
from kata_pin.follow.threads import ThreadEvents
from kata_pin.linux.files import HOST

SERVER = 7
"""The pid of a process that may serve a sandbox."""


def test_every_program_is_noted_and_not_every_one_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are read again of all; anybody can start programs, so the rest is bounded."""
    executed: list[int] = []
    asked: list[int] = []

    def may_serve(pid: int) -> bool:
        asked.append(pid)
        return pid == SERVER

    nothing, index = cast("Any", None), cast("Any", SimpleNamespace(note_exec=executed.append))
    events = ThreadEvents(
        *(HOST, nothing, nothing, nothing, Sandboxes(), Counters()),
        *(index, may_serve, lambda: None),
    )
    monkeypatch.setattr(threads, "MAX_LOOKS", 2)
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    assert [events._is_wanted(pid) for pid in (6, SERVER, SERVER)] == [False, True, False]
    assert (executed, asked) == ([6, SERVER, SERVER], [6, SERVER])
