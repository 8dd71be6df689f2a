"""What members of the daemon's group may ask of the status socket, and how often.

They only read, but making a document takes time of the event loop that hooks need too. So one
user has few connections and one request in work at a time, at a bounded rate; equal requests within
a moment get the same answer; and the loop makes documents for all of them a quarter of the time at
most. Root and the daemon's own user are not limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

MOST_CONNECTIONS: Final = 8
"""Connections of one user at a time."""

PER_SECOND: Final = 10.0
BURST: Final = 20.0
"""Requests of one user: so many per second, after so many at once."""

FRESH_S: Final = 0.2
"""For so long the same request gets the same answer."""

REST: Final = 3.0
"""After an answer was made, no other is made for this many times as long."""

MAX_ANSWERS: Final = 8
"""Answers that are kept; the largest takes some 3 MiB."""


@dataclass
class _User:
    """One user that is connected, or that was a moment ago."""

    connections: int = 0
    tokens: float = BURST
    counted_at: float = field(default_factory=time.monotonic)
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def wait_s(self) -> float:
        """Take a request from the user's rate; return how long it has to wait for that."""
        now = time.monotonic()
        self.tokens = min(BURST, self.tokens + (now - self.counted_at) * PER_SECOND) - 1
        self.counted_at = now
        return max(0.0, -self.tokens / PER_SECOND)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lost by forgetting the user."""
        full = self.tokens + (time.monotonic() - self.counted_at) * PER_SECOND >= BURST
        return not self.connections and full


class Readers:
    """The users of one socket; used in the event loop's thread only."""

    def __init__(self) -> None:
        self._users: dict[int, _User] = {}
        self._answers: dict[bytes, tuple[float, bytes]] = {}
        self._making = asyncio.Lock()
        self._not_before = 0.0

    @contextlib.contextmanager
    def connected(self, uid: int) -> Iterator[bool]:
        """Count a connection within the block; yield whether the user may have it."""
        for known in [one for one, user in self._users.items() if user.is_idle]:
            del self._users[known]
        user = self._users.setdefault(uid, _User())
        user.connections += 1
        try:
            yield user.connections <= MOST_CONNECTIONS
        finally:
            user.connections -= 1

    async def answer(self, uid: int, line: bytes, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the answer to a request line of a connected user, made now or a moment ago."""
        user = self._users[uid]
        async with user.asking:
            await asyncio.sleep(user.wait_s())
            fresh = self._fresh(line)
            if fresh is not None:
                return fresh
            async with self._turn():
                return self._fresh(line) or self._kept(line, await make())

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until an answer may be made; the block makes it."""
        async with self._making:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            began = time.monotonic()
            try:
                yield
            finally:
                now = time.monotonic()
                self._not_before = now + (now - began) * REST

    def _fresh(self, line: bytes) -> bytes | None:
        made_at, answer = self._answers.get(line, (0.0, b""))
        return answer if answer and time.monotonic() - made_at < FRESH_S else None

    def _kept(self, line: bytes, answer: bytes) -> bytes:
        now = time.monotonic()
        self._answers = {
            key: known for key, known in self._answers.items() if now - known[0] < FRESH_S
        }
        while len(self._answers) >= MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        self._answers[line] = now, answer
        return answer
