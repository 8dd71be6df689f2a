"""What the event loop itself reports: one line each, without a traceback.

asyncio stops accepting on a socket for a second when the process has no descriptor or memory left
(the module selector_events), and reports that each time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Final

from kata_pin.errors import is_transient, reason_of

log = logging.getLogger(__name__)

REPEAT_S: Final = 60.0
"""Least time between two lines about one socket."""


class LoopErrors:
    """An exception handler of an event loop (loop.set_exception_handler)."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}

    def __call__(self, _loop: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
        """Log what asyncio reports."""
        error, listener = context.get("exception"), context.get("socket")
        reason = reason_of(error) if isinstance(error, BaseException) else ""
        if isinstance(error, OSError) and is_transient(error) and listener is not None:
            place = _address(listener)
            if time.monotonic() - self._logged.get(place, -REPEAT_S) >= REPEAT_S:
                self._logged[place] = time.monotonic()
                log.warning("cannot accept connections on %s: %s; retrying", place, reason)
            return
        log.error("unexpected: %s: %s", context.get("message", "event loop"), reason)
        if isinstance(error, BaseException):
            log.debug("event loop", exc_info=error)


def _address(listener: object) -> str:
    """Return where a socket listens, for people."""
    name = getattr(listener, "getsockname", str)()
    if isinstance(name, str):  # bound under another name first (unix_socket.listen)
        return name.removesuffix(".new")
    return ":".join(map(str, name[:2]))
