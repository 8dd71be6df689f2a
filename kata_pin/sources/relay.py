"""A library that only takes addresses gets a connected socket, over an address of our own.

It listens on an abstract address that the kernel chooses (unix(7)), for one connection of this
very process, and passes bytes on in both directions until either end closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Final

from kata_pin.sources import unix_socket

PIECE: Final = 64 * 1024


@contextlib.asynccontextmanager
async def relayed(end: socket.socket) -> AsyncIterator[str]:
    """Relay to a connected socket within the block; yield the abstract address, without its NUL."""
    with contextlib.ExitStack() as closing:
        closing.enter_context(end)
        listener = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.settimeout(0)
        listener.bind("")
        listener.listen(1)
        address = listener.getsockname()
        task = asyncio.create_task(_relay(listener, end))
        try:
            yield address[1:].decode()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _relay(listener: socket.socket, end: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        ours, _ = await loop.sock_accept(listener)
        if unix_socket.peer(ours).pid == os.getpid():
            break
        ours.close()
    with ours:
        await asyncio.gather(_pump(ours, end), _pump(end, ours))


async def _pump(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until the source ends, and let the target know."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(source, PIECE):
            await loop.sock_sendall(target, data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
