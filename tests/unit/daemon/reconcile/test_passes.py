"""The runner of passes: what an observer's failure does to others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.config import Config
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.engine import Engine
from kata_pin.daemon.reconcile.passes import PassRunner
from kata_pin.daemon.reconcile.ports import GuestPreparer, Observer
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.pins import Pins
from kata_pin.host.root import HOST
from kata_pin.model.pass_outcome import PassOutcome
from kata_pin.model.placement import Report
from tests.support import world


class Broken:
    """An observer whose file is full."""

    def passed(self, outcome: PassOutcome) -> None:
        """Fail."""
        raise OSError("no space left")

    ended = passed

    def failed(self, operation: str, error: Exception) -> None:
        """Fail too."""
        raise OSError("no space left")


class Listening:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def passed(self, outcome: PassOutcome) -> None:
        """Keep it."""
        self.told.append(outcome.sandbox_id)

    ended = passed

    def failed(self, operation: str, error: Exception) -> None:
        """Not used here."""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    opened = Registry(str(tmp_path / "registry.db"), boot_id="b")
    yield opened
    opened.close()


def _passes(registry: Registry, *observers: Observer) -> tuple[Sandboxes, PassRunner]:
    """Return a runner whose engine does nothing, and its table."""

    def never(work: Coroutine[object, object, None]) -> None:
        work.close()

    sandboxes = Sandboxes()
    engine = SimpleNamespace(run=lambda sandbox_id, *_, **__: Report(sandbox_id=sandbox_id))
    passes = PassRunner(
        HOST,
        sandboxes,
        cast("Engine", engine),
        registry,
        Pins(registry),
        LiveConfig(Config()),
        never,
        cast("Any", None),
        cast("GuestPreparer", None),
        observers,
    )
    return sandboxes, passes


async def test_an_observer_that_fails_keeps_nothing_from_the_others(registry: Registry) -> None:
    """The others are told all the same."""
    listening = Listening()
    sandboxes, passes = _passes(registry, Broken(), listening)
    sandboxes.enter("s")
    await passes.release("s", remember=False)
    assert listening.told == ["s"]


async def test_releasing_all_yields_between_sandboxes(registry: Registry) -> None:
    """Between any two sandboxes the event loop serves others; one that ended is left out."""
    listening = Listening()
    sandboxes, passes = _passes(registry, listening)
    for one in ("a", "b"):
        sandboxes.enter(one)
    served: list[int] = []

    async def serve() -> None:
        while True:
            served.append(len(listening.told))
            await asyncio.sleep(0)

    serving = asyncio.create_task(serve())
    for one in ("a", "gone", "b"):
        await passes.release(one, remember=False)
    serving.cancel()
    assert listening.told == ["a", "b"]
    assert 1 in served


async def test_an_unpin_is_remembered_in_its_turn(registry: Registry) -> None:
    """A pass that runs before it is an ordinary one: its reason is not taken for the unpin's."""
    listening = Listening()
    sandboxes, passes = _passes(registry, listening)
    sandboxes.enter("s")
    async with passes._scheduler.turn("other"):
        unpin = asyncio.create_task(passes.release("s", remember=True))
        await asyncio.sleep(0)
        assert Pins(registry).released() == frozenset()
    await unpin
    assert Pins(registry).released() == {"s"}
    assert listening.told == ["s"]


async def test_a_vmm_that_was_found_outside_a_pass_is_watched(registry: Registry) -> None:
    """A release found it, or a pass that failed afterwards: its exit is still waited for, once."""
    sandboxes, passes = _passes(registry, Listening())
    started: list[object] = []

    def start(work: Coroutine[object, object, None]) -> None:
        started.append(work)
        work.close()

    passes._start = start
    vmm = world.sandbox().vmm
    sandboxes.enter("s").cache.vmm = vmm
    passes._run_pass("s")
    passes._run_pass("s")
    assert len(started) == 1
