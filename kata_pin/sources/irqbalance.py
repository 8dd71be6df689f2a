"""Starts and ends of irqbalance, by the sockets in its folder."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Final

from asyncinotify import Mask

from kata_pin.sources.watches import folder_events

RETRY_S: Final = 10.0


async def socket_changes(folder: str) -> AsyncGenerator[None, None]:
    """Yield when watching begins, and whenever a socket came or went, for ever."""
    mask = Mask.CREATE | Mask.MOVED_TO | Mask.DELETE
    async for _ in folder_events(folder, mask, retry_s=RETRY_S, level=logging.DEBUG):
        yield None
