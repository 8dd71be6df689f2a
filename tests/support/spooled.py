"""A spool folder as hooks fill it, and a watcher of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from kata_pin.peers.oci import Phase
from kata_pin.records.hooks import HookMessage, Spool
from tests.support.hooks import encode


def message(stamp_ns: int, pid: int = 7) -> HookMessage:
    return HookMessage(Phase.POSTSTART, stamp_ns, pid, b"{}")


def leave(folder: Path, item: HookMessage) -> Path:
    """Spool a message as the hook does: under a temporary name first."""
    unfinished = folder / item.spool_name.replace(".msg", ".tmp")
    unfinished.write_bytes(encode(item))
    return unfinished.rename(folder / item.spool_name)


def pending(folder: Path) -> list[HookMessage]:
    return list(Spool(str(folder)).pending())


@asynccontextmanager
async def watching(folder: Path) -> AsyncIterator[AsyncIterator[None]]:
    async with asyncio.timeout(10), aclosing(Spool(str(folder)).watch()) as news:
        await anext(news)  # the watch stands
        yield news
