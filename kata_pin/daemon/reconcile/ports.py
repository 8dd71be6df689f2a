"""What passes need of the rooms above, as Protocols."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from kata_pin.model.pass_outcome import PassOutcome
from kata_pin.model.placement import Report


class Observer(Protocol):
    """Gets the outcome of every pass, before a waiting hook is answered; must be quick."""

    def passed(self, outcome: PassOutcome) -> None:
        """Take a pass after which the sandbox goes on."""

    def ended(self, outcome: PassOutcome) -> None:
        """Take a pass that found that the sandbox has ended."""

    def failed(self, operation: str, error: Exception) -> None:
        """Take the error of a pass that failed; `operation` is a word for metrics.

        By default nothing happens: the next pass repeats what a failed one left undone.
        """
        return


class GuestPreparer(Protocol):
    """Prepares a sandbox's guest for a pass that will move vCPU threads."""

    async def before(self, sandbox_id: str, foresee: Callable[[], Awaitable[Report]]) -> None:
        """Return when the pass may run; `foresee` returns what it would decide."""
