"""What others take of the passes, and what passes take of others, as Protocols."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.pass_outcome import PassOutcome
from kata_pin.model.placement import Report
from kata_pin.model.thread import ThreadKey, ThreadRole


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


class PinStore(Protocol):
    """What passes need to remember beyond a restart; the registry is one."""

    def pairs(self, sandbox_id: str) -> dict[ThreadKey, int]:
        """Return the pCPU of each paired vCPU thread."""

    def first_seen(self, sandbox_id: str) -> dict[ThreadRole, CpuSet]:
        """Return the affinity of each role before the first pin; empty when never pinned."""

    def keep(
        self,
        sandbox_id: str,
        *,
        pairs: Mapping[ThreadKey, int],
        first_seen: Mapping[ThreadRole, CpuSet],
    ) -> None:
        """Remember both, before any affinity is set."""
