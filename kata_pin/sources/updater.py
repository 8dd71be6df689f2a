"""Changing a container's cpuset at a time of our own choice: the port, and its errors.

Two implementations: NRI's unsolicited updates (nri.py), and CRI as the kubelet uses it (cri.py).
"""

from __future__ import annotations

from typing import Final, Protocol

from kata_pin.errors import KataPinError
from kata_pin.wire.nri.replies import Cpuset

DEADLINE_S: Final = 5.0
"""Longest a runtime may take for one container: it asks every NRI plugin on the way, 2 s each."""

SLOW: Final = "no answer from the runtime within {:g} s"
"""The text of UpdateRefused after the deadline."""


class RuntimeUnavailable(KataPinError):  # noqa: N818 - an ordinary state
    """The runtime cannot be called now, for no container."""


class UpdateRefused(KataPinError):  # noqa: N818 - says what was refused
    """The runtime did not change this container, or not in time (its VM may hang).

    Calls about other containers may succeed.
    """


class ContainerUnknown(UpdateRefused):
    """The runtime has no such container: it has ended, or belongs to another runtime."""


class Updater(Protocol):
    """Changes cpusets; never call it while the runtime waits for our answer."""

    async def update(self, container_id: str, cpuset: Cpuset) -> None:
        """Change a container's cpuset, within a deadline.

        Raises RuntimeUnavailable or UpdateRefused; the change may still happen after either.
        """
