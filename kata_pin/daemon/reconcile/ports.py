"""What others take of the passes: asking for one, and being told of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from kata_pin.model.pass_outcome import PassOutcome
from kata_pin.model.placement import Report


class PassRequests(Protocol):
    """Asks for passes; the table of sandboxes is one."""

    @property
    def ids(self) -> Collection[str]:
        """The sandboxes that have a supervisor."""

    def mark(self, sandbox_id: str, reason: str, *, event: bool = True) -> int:
        """Ask for a pass over a sandbox, new or known; return a ticket for `settled`.

        `event`: something happened to the sandbox, so backing off from another writer ends (D13).
        """

    async def settled(self, sandbox_id: str, ticket: int) -> Report | None:
        """Wait for the pass that answers a ticket; None if it failed or the sandbox has ended."""


class Observer(Protocol):
    """Is told of every pass, before whoever waits for it; called in the event loop, so quick."""

    def passed(self, outcome: PassOutcome) -> None:
        """Take a pass after which the sandbox goes on."""

    def ended(self, outcome: PassOutcome) -> None:
        """Take a pass that found that the sandbox has ended."""

    def failed(self, operation: str, error: Exception) -> None:
        """Take the error of a pass that failed; `operation` is a word for metrics."""


class GuestPreparer(Protocol):
    """Prepares a sandbox's guest for a pass that will move vCPU threads."""

    async def before(self, sandbox_id: str, foresee: Callable[[], Awaitable[Report]]) -> None:
        """Return when the pass may run; `foresee` says what it would decide, and sets nothing."""
