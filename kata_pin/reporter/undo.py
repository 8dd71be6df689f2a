"""Restoring affinities on all nodes: one more rollout, in which each daemon releases its sandboxes.

The step is a postStart handler: a pod is ready only after it ended well, and it runs with the
rights and mounts that the daemon has already. Nothing else of the DaemonSet is read or changed.
"""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kata_pin.errors import KataPinError, ParseError, StateError
from kata_pin.reporter.api import ApiRefused, Backoff
from kata_pin.sources.http_client import Answer, HttpClient
from kata_pin.wire.kube import objects

STRATEGIC: Final = "application/strategic-merge-patch+json"
LOOK_S: Final = 3.0

LASTING: Final = frozenset(
    {http.client.UNAUTHORIZED, http.client.FORBIDDEN, http.client.UNPROCESSABLE_ENTITY}
)
"""Refusals that another attempt does not change."""


@dataclass
class Rollout:
    """A DaemonSet that is rolled out with the step; `say` prints a line."""

    client: HttpClient
    namespace: str
    name: str
    say: Callable[[str], None]
    _backoff: Backoff = field(default_factory=Backoff)

    @property
    def path(self) -> str:
        """Where the DaemonSet is."""
        return f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets/{self.name}"

    async def release(self, timeout_s: float) -> None:
        """Release all nodes; raises KataPinError if that is refused, or takes too long."""
        deadline = time.monotonic() + timeout_s
        found = await self._insist("PATCH", objects.encode_release(), deadline)
        last = ""
        while found is not None:
            wanted, updated, ready = self._progress(found)
            line = f"{min(updated, ready)} of {wanted} nodes released"
            if line != last:
                self.say(line)
            last = line
            if updated >= wanted and ready >= wanted:
                return
            if time.monotonic() + LOOK_S > deadline:
                raise KataPinError(
                    f"{line} within {timeout_s:g} s",
                    hint="pods that are not ready say why: kubectl describe pod; the others are",
                )
            await asyncio.sleep(LOOK_S)
            found = await self._insist("GET", None, deadline)
        self.say(f"there is no DaemonSet {self.namespace}/{self.name}: nothing to release")

    def _progress(self, answer: Answer) -> tuple[int, int, int]:
        try:
            return objects.parse_rollout(bytes(answer.body))
        except ParseError as error:
            raise KataPinError(f"{self.path}: {error}") from error

    async def _insist(self, method: str, body: bytes | None, deadline: float) -> Answer | None:
        """Return the answer, None for a DaemonSet that is not there; try again for a while."""
        while True:
            try:
                answer = await self._once(method, body)
            except (ApiRefused, StateError) as error:
                lasting = isinstance(error, ApiRefused) and error.status in LASTING
                after_s = error.after_s if isinstance(error, ApiRefused) else 0.0
                wait_s = self._backoff.failed(after_s)
                if lasting or time.monotonic() + wait_s > deadline:
                    raise
                self.say(f"{error}; trying again in {wait_s:.0f} s")
                await asyncio.sleep(wait_s)
            else:
                self._backoff.succeeded()
                return answer

    async def _once(self, method: str, body: bytes | None) -> Answer | None:
        kind = "" if body is None else STRATEGIC
        answer = await self.client.ask(method, self.path, HttpClient.whole, body=body, kind=kind)
        if answer.status == http.client.NOT_FOUND:
            return None
        if answer.status != http.client.OK:
            message = objects.parse_refusal(bytes(answer.body))
            raise ApiRefused(f"{method} {self.path}", answer.status, message, answer.retry_after_s)
        return answer
