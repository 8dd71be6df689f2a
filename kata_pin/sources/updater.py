"""A way to have the runtime change a container's cpuset outside of its own calls to us.

Two there are: NRI's updates unasked (nri.py), and CRI as the kubelet does it (cri.py). Nothing is
kept here.
"""

from __future__ import annotations

from typing import Final, Protocol

from kata_pin.errors import KataPinError
from kata_pin.wire.nri.replies import Cpuset

DEADLINE_S: Final = 5.0
"""Longest a runtime may take for one container; it asks every NRI plugin, 2 s each, on the way."""

MAX_WORDS: Final = 200
"""Longest text of a runtime's that is shown."""


class RuntimeUnavailable(KataPinError):  # noqa: N818 - an ordinary state
    """The runtime cannot be asked now, whichever container it is about."""


SLOW: Final = "no answer of the runtime within {:g} s"
"""What UpdateRefused says after its deadline."""


class UpdateRefused(KataPinError):  # noqa: N818 - says what was refused
    """The runtime did not change this container, or not in time: its VM may hang.

    It may be asked for others.
    """


class ContainerUnknown(UpdateRefused):
    """The runtime has no such container: it is gone, or it is another runtime's."""


class Updater(Protocol):
    """Changes cpusets; never used while the runtime waits for an answer of ours."""

    async def update(self, container_id: str, cpuset: Cpuset) -> None:
        """Return when a container has a cpuset; raises RuntimeUnavailable or UpdateRefused.

        It has a deadline of its own. What it raised about may still happen later.
        """


def words(text: str) -> str:
    """Return a runtime's own words as they may be shown: printable and not long."""
    plain = "".join(sign if sign.isprintable() else " " for sign in text[: 2 * MAX_WORDS])
    return plain if len(plain) <= MAX_WORDS else f"{plain[: MAX_WORDS - 3]}..."
