"""irqbalance as a tunable: which pCPUs it keeps clear of interrupts.

It is asked over its own socket, so no file of its is edited and it is not restarted. A ban holds
from its next round on, some seconds later, and is lost with the process; another process is another
tunable. Facts: irqbalance.c, sock_handle; `settings cpus` replaces all earlier bans.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from errno import ECONNREFUSED, EINVAL, ENOENT
from typing import Final

from kata_pin.daemon.quiet.tuner import Write, Written
from kata_pin.errors import HostError, ParseError, reason_of
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import starttime
from kata_pin.model.quiet.tunables import Observed, TunableKey, TunableKind
from kata_pin.wire.kernel.irqbalance import MAX_BYTES, Setup, parse_setup

FOLDER: Final = "/run/irqbalance"
ANSWER_S: Final = 1.0
MOST: Final = 8
"""Most sockets that are asked; there is one irqbalance per node."""

ROUNDS: Final = 3
"""Rounds of irqbalance after which a ban that does not show was not taken."""

_SOCKET: Final = re.compile(r"irqbalance([1-9][0-9]{0,9})\.sock\Z")


@dataclass
class _Sent:
    """A list that was sent and does not show yet."""

    value: str
    until: float


class Irqbalance:
    """The irqbalance processes of this node that can be reached."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._sent: dict[str, _Sent] = {}
        self._sleep_s: dict[str, int] = {}
        self._given_back: set[str] = set()
        self.problem = ""
        """Why one cannot be asked; empty where all is well, or there is none."""
        self.running: tuple[int, ...] = ()

    async def observe(self) -> list[Observed]:
        """Return each with the pCPUs that it keeps clear; one that is yet to act is left out."""
        found = []
        self.problem = ""
        pids = self._pids()
        for pid in pids:
            try:
                identity = str(starttime(self._root, pid, pid))
                setup = await self._setup(pid)
            except (OSError, HostError, ParseError) as error:  # TimeoutError is an OSError
                if _is_gone(error):
                    continue
                self.problem = f"irqbalance (pid {pid}) does not answer: {reason_of(error)}"
                continue
            one = Observed(
                TunableKey(TunableKind.IRQBALANCE, str(pid)), identity, str(setup.banned),
                f"irqbalance (pid {pid})",
            )  # fmt: skip
            self._sleep_s[one.key.name] = setup.sleep_s
            if not self._is_pending(one):
                found.append(one)
        self.running = tuple(pids)
        self._sent = {name: one for name, one in self._sent.items() if int(name) in pids}
        return found

    async def write(self, writes: Sequence[Write]) -> list[Written]:
        """Tell each which pCPUs to keep clear; what comes of it shows later."""
        return [await self._tell(one) for one in writes]

    def _pids(self) -> list[int]:
        try:
            names = self._root.calls.listdir(self._root.path(FOLDER))
        except FileNotFoundError:
            return []
        except OSError as error:
            self.problem = f"cannot read {FOLDER}: {reason_of(error)}"
            return []
        found = [int(match[1]) for match in map(_SOCKET.match, names) if match]
        return sorted(found)[:MOST]

    def _is_pending(self, one: Observed) -> bool:
        """Return whether a list that was sent does not show yet."""
        sent = self._sent.get(one.key.name)
        if sent is None or one.value == sent.value or time.monotonic() > sent.until:
            self._sent.pop(one.key.name, None)
            return False
        return True

    async def _setup(self, pid: int) -> Setup:
        loop = asyncio.get_running_loop()
        with self._root.calls.ask_irqbalance(pid, None) as end:
            end.settimeout(0)
            answer = b""
            async with asyncio.timeout(ANSWER_S):
                while b"BANNED" not in answer and len(answer) < MAX_BYTES:
                    more = await loop.sock_recv(end, MAX_BYTES)
                    if not more:
                        break
                    answer += more
        return parse_setup(answer)

    async def _tell(self, one: Write) -> Written:
        """Send a list; the first time that the first one is given back, its own configuration."""
        name = one.key.name
        own = one.value == one.first and name not in self._given_back
        banned = "" if own else one.value
        (self._given_back.add if own else self._given_back.discard)(name)
        try:
            end: socket.socket = self._root.calls.ask_irqbalance(int(name), banned)
        except OSError as error:
            return Written(ENOENT if _is_gone(error) else error.errno or EINVAL)
        end.close()
        until = time.monotonic() + ROUNDS * self._sleep_s.get(name, 10) + 2
        self._sent[name] = _Sent(one.value, until)
        return Written(0)


def _is_gone(error: Exception) -> bool:
    """Return whether there is no such process any more, only its socket."""
    return isinstance(error, OSError | HostError) and error.errno in {ENOENT, ECONNREFUSED}
