"""What becomes of process events."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest

from kata_pin.daemon.intake import thread_events
from kata_pin.daemon.intake.thread_events import ThreadEvents
from kata_pin.daemon.reconcile.counters import Counters
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.host.process import ProcessIndex
from kata_pin.host.root import HOST
from kata_pin.sources.process_events import NewProgram, Overrun

SERVER = 7
"""The pid of a process that may serve a sandbox."""


class World:
    """Stands for everything around ThreadEvents: it counts looks, and keeps who ran a program."""

    def __init__(self) -> None:
        self.looks = 0
        self.executed: list[int] = []
        self.asked: list[int] = []
        self.sandboxes = Sandboxes()
        nothing = cast("Any", None)
        self.counters = Counters()
        self.events = ThreadEvents(
            *(HOST, nothing, nothing, self.sandboxes, self.counters),
            *(cast("ProcessIndex", self), self._may_serve, self._look),
        )

    def note_exec(self, pid: int) -> None:
        self.executed.append(pid)

    def _may_serve(self, pid: int) -> bool:
        self.asked.append(pid)
        return pid == SERVER

    def _look(self) -> None:
        self.looks += 1

    def marked(self) -> list[str]:
        """Return the sandboxes that a pass was asked for."""
        return [one for one in self.sandboxes.ids if self.sandboxes.entry(one).supervisor._wanted]


@pytest.fixture
def world() -> World:
    made = World()
    made.sandboxes.enter("p1")
    made.sandboxes.enter("p2")
    return made


def test_a_program_that_a_shim_starts_is_its_sandboxes(world: World) -> None:
    """Processes are looked at, for it may be a new sandbox's, and the parent's gets a pass."""
    world.sandboxes.track("p1", {os.getppid()})
    world.events._take(NewProgram(os.getpid()))
    assert (world.looks, world.marked()) == (1, ["p1"])


def test_a_program_that_has_ended_again(world: World) -> None:
    """Its parent cannot be known; the look finds what there is."""
    world.events._take(NewProgram(2**22 + 1))
    assert (world.looks, world.marked()) == (1, [])


def test_lost_events_may_have_been_a_start(world: World) -> None:
    """Everything known gets a pass, and what is not known is looked for."""
    world.events._take(Overrun())
    assert (world.looks, world.marked()) == (1, ["p1", "p2"])
    assert world.counters.overruns == 1


def test_every_program_is_noted_and_not_every_one_asked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are read again of all; anybody can start programs, so the rest is bounded."""
    monkeypatch.setattr(thread_events, "MAX_LOOKS", 2)
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    assert [world.events._is_wanted(pid) for pid in (6, SERVER, SERVER)] == [False, True, False]
    assert (world.executed, world.asked) == ([6, SERVER, SERVER], [6, SERVER])
