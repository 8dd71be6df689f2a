"""Asking a QEMU over QMP from this process, with the package qemu.qmp.

For processes without a broker: root's own commands, and a daemon that runs as root. The broker has
the standard library only and talks to QEMU itself (rights/broker/threads.py). Both ask the same;
one suite of tests runs over both.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import socket
from errno import EMSGSIZE, EPROTO, ETIMEDOUT
from typing import Final

from qemu.qmp import Message, QMPClient, QMPError
from qemu.qmp.protocol import Runstate

from kata_pin.base.errors import ParseError
from kata_pin.base.json_text import check_bounds
from kata_pin.rights.broker.threads import COMMANDS, MAX_GREETING, MAX_REPLY

CLOSE_S: Final = 0.05
MAX_VALUES: Final = 65_536
"""Most brackets and commas in one session: 4,096 vCPUs take about 53,000."""

# qemu.qmp logs every lost connection as an error, with a traceback; the caller reports it instead.
_quiet = logging.getLogger(f"{__name__}.client")
_quiet.disabled = True


_BROKEN: Final = (QMPError, OSError, EOFError, ValueError, RecursionError, AssertionError)
"""What a session raises when the peer misbehaves, from disconnect too: ValueError for a line above
MAX_REPLY, AssertionError by the client itself when it is cancelled while it cleans up."""


class _Client(QMPClient):
    """The client with bounds on what it parses: `[],[],...` grows thirtyfold when parsed."""

    def __init__(self) -> None:
        super().__init__(readbuflen=MAX_REPLY)
        self.logger = _quiet
        self._values = MAX_VALUES

    async def _do_recv(self) -> Message:
        """Receive one message; raises ParseError for more than a QEMU would ever send."""
        line = await self._readline()
        limit = MAX_REPLY if self.greeting else MAX_GREETING
        self._values -= check_bounds(line, source="QMP", limit=limit, values=self._values)
        return Message(line, eager=True)

    # The originals format every message for the log, many times its size in memory.
    def _cb_outbound(self, msg: Message) -> Message:
        return msg

    def _cb_inbound(self, msg: Message) -> Message:
        return msg


async def converse(end: socket.socket, greeting_s: float, session_s: float) -> bytes:
    """Return the answers to the two queries, a line each, as QEMU sends them; raises OSError.

    `end` was just connected. It is closed in the end, also when this is cancelled.
    """
    try:
        return await _session(end, greeting_s, session_s)
    except OSError as error:
        number, text = error.errno or EPROTO, error.strerror
    # What the client leaves of a failed session is in cycles, with all that QEMU sent; it is young.
    gc.collect(1)
    raise OSError(number, text)


async def _session(end: socket.socket, greeting_s: float, session_s: float) -> bytes:
    client = _Client()
    try:
        async with asyncio.timeout(session_s):
            await asyncio.wait_for(client.connect(end), greeting_s)  # negotiates capabilities
            answers = [await client.execute(command.decode()) for command in COMMANDS[1:]]
    except TimeoutError as error:
        raise OSError(ETIMEDOUT, "no answer in time") from error
    except ParseError as error:
        raise OSError(EMSGSIZE, error.message) from error
    except _BROKEN as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError from error
        raise OSError(EPROTO, str(error) or type(error).__name__) from error
    finally:
        await _close(client, end)
    return b"\n".join(json.dumps({"return": answer}).encode() for answer in answers)


async def _close(client: QMPClient, end: socket.socket) -> None:
    """Free the slot, first on the wire: that holds even if this is cancelled again.

    The descriptor is closed only after the event loop has released it: its number is reused.
    """
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(*_BROKEN):
        if client.runstate is not Runstate.IDLE:
            async with asyncio.timeout(CLOSE_S):
                await client.disconnect()
    if client.runstate is Runstate.IDLE:
        end.close()
