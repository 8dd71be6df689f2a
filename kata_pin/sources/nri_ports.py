"""The NRI plugin's ports: what it reports events to, and what decides cpusets for it."""

from __future__ import annotations

from typing import Protocol

from kata_pin.errors import KataPinError
from kata_pin.wire.nri.messages import Event, Snapshot
from kata_pin.wire.nri.replies import Answer, Update


class Listener(Protocol):
    """Receives events. An exception ends the connection, and the next one reports everything again.

    `stamp_ns` is when the message was received (CLOCK_BOOTTIME).
    """

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        """Take all pods and containers of now. Events that come before this returns are newer."""

    def take(self, event: Event, stamp_ns: int) -> int:
        """Take one event; return a ticket for `placed`, 0 for nothing to wait for. Never blocks."""

    async def placed(self, event: Event, ticket: int) -> None:
        """Return once the pins that an event asks for are applied; may be cancelled."""


class CreationRefused(KataPinError):  # noqa: N818 - refused by a rule, not failed
    """A container may not be created; the runtime reports the reason."""


class Decider(Protocol):
    """Decides cpusets. Every method answers at once, with its decision recorded."""

    def adopt(self, snapshot: Snapshot) -> tuple[Update, ...]:
        """Take all pods and containers of now; return the changes.

        The listener gets the same snapshot afterwards.
        """

    def decide(self, event: Event, stamp_ns: int) -> Answer:
        """Take a creation, an update or an end; return the changes. Raises CreationRefused.

        The listener gets these events only where this raised anything else.
        """

    def ended(self) -> None:
        """Note that the connection has ended: no answer or update arrives any more."""
