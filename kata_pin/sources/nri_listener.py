"""Who the NRI plugin tells, and who decides for it (sources/nri.py has the connection).

Nothing is kept here.
"""

from __future__ import annotations

from typing import Protocol

from kata_pin.errors import KataPinError
from kata_pin.wire.nri.messages import Event, Snapshot
from kata_pin.wire.nri.replies import Answer, Update


class Listener(Protocol):
    """Who is told. An exception of any of these ends the connection, and all is told anew.

    `stamp_ns` is when it was received, on CLOCK_BOOTTIME.
    """

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        """Take everything that there is now. Events may come before this ends: they are newer."""

    def take(self, event: Event, stamp_ns: int) -> int:
        """Take one event; return a ticket for `placed`, 0 for nothing to wait for. Never blocks."""

    async def placed(self, event: Event, ticket: int) -> None:
        """Return once the pins stand that an event asks for; may be cancelled."""


class CreationRefused(KataPinError):  # noqa: N818 - refused by a rule, not failed
    """A container may not be created: the runtime tells the reason to whoever wants it."""


class Decider(Protocol):
    """Who decides cpusets. Every method answers at once, with what it decided recorded."""

    def adopt(self, snapshot: Snapshot) -> tuple[Update, ...]:
        """Take everything that there is now; return what is to be changed of it.

        The listener is told the same afterwards.
        """

    def decide(self, event: Event, stamp_ns: int) -> Answer:
        """Take a creation, an update or an end; return what it changes. Raises CreationRefused.

        The listener is told of these events only where this raised anything else.
        """

    def ended(self) -> None:
        """Take note that the connection has ended: nothing is delivered any more."""
