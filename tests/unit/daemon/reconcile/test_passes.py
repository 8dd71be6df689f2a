"""The runner of passes: what an observer's failure does to others."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kata_pin.config import Config
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.engine import Engine
from kata_pin.daemon.reconcile.passes import PassRunner
from kata_pin.daemon.reconcile.ports import GuestPreparer
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.store.database import Registry
from kata_pin.host.root import HOST
from kata_pin.model.pass_outcome import PassOutcome
from kata_pin.model.placement import Report


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


def test_an_observer_that_fails_keeps_nothing_from_the_others(tmp_path: Path) -> None:
    """The others are told all the same, and the report of the pass is returned."""

    def never(work: Coroutine[object, object, None]) -> None:
        work.close()

    registry = Registry(str(tmp_path / "registry.db"), boot_id="b")
    listening = Listening()
    engine = SimpleNamespace(run=lambda sandbox_id, *_, **__: Report(sandbox_id=sandbox_id))
    passes = PassRunner(
        HOST,
        Sandboxes(),
        cast("Engine", engine),
        registry,
        LiveConfig(Config()),
        start=never,
        ask=cast("Any", None),
        guests=cast("GuestPreparer", None),
        observers=[Broken(), listening],
    )
    assert passes.release("s").sandbox_id == "s"
    assert listening.told == ["s"]
    registry.close()
