"""The requests to the API server, and when to make the next one.

One more rollout restores affinities on all nodes.

Every answer is bounded and has a deadline. What the API server refuses is an ApiRefused with its
status; what kept a request from being answered is a StateError (peers/http.py).
"""

from __future__ import annotations

import asyncio
import http.client
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar
from urllib.parse import quote

from kata_pin.base.errors import KataPinError, ParseError, StateError
from kata_pin.linux.owned_files import FileRefused, read_projected
from kata_pin.options.cluster import values
from kata_pin.options.cluster.values import NodeStatus, PodEvent, Zone
from kata_pin.peers.http import MAX_TOKEN, HttpAnswer, HttpClient

T = TypeVar("T")

APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
JSON: Final = "application/json"

MANAGER: Final = "kata-pin"
"""Our name as the manager of fields (server-side apply)."""

FIRST_S: Final = 1.0
LONGEST_S: Final = 300.0
"""Waits after failures: doubled each time from the first to the longest."""

JSON_PATCH: Final = "application/json-patch+json"

_TOPOLOGIES: Final = f"/apis/{values.TOPOLOGY_GROUP}/noderesourcetopologies"
_OBJECTS: Final = f"/apis/{values.GROUP}/nodeplacements"

_HINTS: Final = {
    401: "its token is not accepted, or has expired",
    403: "the role and the admission policy of hooks/charts/kata-pin allow this node's object only",
    404: "is its CustomResourceDefinition installed?",
    410: "the API server no longer serves this version",
}
_OTHER_SCHEMA: Final = "field not declared in schema"
_SCHEMA_HINT: Final = (
    "the cluster's CustomResourceDefinition is of another version of kata-pin: apply this one's, "
    "hooks/charts/kata-pin/files/nodeplacements.yaml"
)


class ApiRefused(KataPinError):  # noqa: N818 - an ordinary state
    """The API server answered with another status; `after_s` is the wait that it wants, else 0."""

    def __init__(self, what: str, status: int, message: str, after_s: float) -> None:
        text = f"{what}: the API server answered HTTP {status}"
        hint = _SCHEMA_HINT if _OTHER_SCHEMA in message else _HINTS.get(status, "")
        super().__init__(f"{text}: {message}" if message else text, hint=hint)
        self.status = status
        self.after_s = after_s


@dataclass
class Backoff:
    """How long to wait after failures in a row; random, so that nodes do not ask together."""

    failures: int = 0

    def failed(self, at_least_s: float = 0.0) -> float:
        """Count a failure; return the wait in seconds."""
        longest = min(LONGEST_S, FIRST_S * 2 ** min(self.failures, 16))
        self.failures += 1
        return at_least_s + random.uniform(longest / 2, longest)  # noqa: S311 - no secret

    def succeeded(self) -> None:
        """Begin again."""
        self.failures = 0


@dataclass
class ApiServer:
    """The API server, as seen with one service account's token."""

    client: HttpClient

    def claims(self) -> values.TokenClaims:
        """Return what our token says of node and pod; nothing where there is none, or no JWT."""
        try:
            return values.parse_token(read_projected(self.client.token, MAX_TOKEN))
        except (OSError, FileRefused, ParseError):
            return values.TokenClaims()

    async def apply(self, node: str, node_uid: str, status: NodeStatus) -> None:
        """Write the node's object, creating it if need be; raises ApiRefused, StateError."""
        path = f"{_OBJECTS}/{quote(node)}"
        query = f"?fieldManager={MANAGER}&force=true"
        body = values.encode_placement(node, node_uid, status)
        try:
            await self._write("PATCH", f"{path}/status{query}", body, APPLY)
        except ApiRefused as error:
            if error.status != http.client.NOT_FOUND:
                raise
            empty = values.encode_placement(node, node_uid, None)
            await self._write("PATCH", path + query, empty, APPLY)
            await self._write("PATCH", f"{path}/status{query}", body, APPLY)

    async def remove_taint(self, node: str, key: str) -> bool:
        """Remove the taints with a key from a node; return whether there was one.

        Raises ApiRefused (422: the taints changed meanwhile), StateError.
        """
        path = f"/api/v1/nodes/{quote(node)}"
        patch = await self._read(path, partial(values.encode_taint_removal, key=key))
        if not patch:
            return False
        await self._write("PATCH", path, patch, JSON_PATCH)
        return True

    async def topology_writer(self, node: str) -> str:
        """Return who else writes the zones of a node's NodeResourceTopology, or nothing."""
        path = f"{_TOPOLOGIES}/{quote(node)}?fieldManager={MANAGER}"
        try:
            writers = await self._read(path, partial(values.parse_writers, field="f:zones"))
        except ApiRefused as error:
            if error.status == http.client.NOT_FOUND:
                return ""
            raise
        return ", ".join(sorted(writers - {MANAGER}))

    async def apply_topology(self, node: str, node_uid: str, zones: Sequence[Zone]) -> None:
        """Write a node's NodeResourceTopology; raises ApiRefused (409: it is another's)."""
        path = f"{_TOPOLOGIES}/{quote(node)}?fieldManager={MANAGER}"
        await self._write("PATCH", path, values.encode_topology(node, node_uid, zones), APPLY)

    async def report(self, event: PodEvent, *, name: str, node: str, when: str) -> None:
        """Create an Event; raises ApiRefused (409: it exists), StateError."""
        body = values.encode_event(event, name=name, node=node, when=when)
        await self._write("POST", _events(event), body, JSON)

    async def repeat(self, event: PodEvent, *, name: str, when: str) -> None:
        """Count an Event once more in its series; raises ApiRefused (404: it has expired)."""
        path = f"{_events(event)}/{quote(name)}"
        count = await self._read(path, values.parse_series) + 1
        await self._write("PATCH", path, values.encode_series(count, when), MERGE)

    async def _read(self, path: str, parse: Callable[[bytes], T]) -> T:
        """Return what an object says.

        An empty patch returns it, so that the token needs no right to read others.
        """
        known = await self._write("PATCH", path, b"{}", MERGE)
        try:
            return parse(bytes(known.body))
        except ParseError as error:
            raise ApiRefused(_named("PATCH", path), known.status, str(error), 0.0) from error

    async def _write(self, method: str, path: str, body: bytes, kind: str) -> HttpAnswer:
        return await _asked(self.client, method, path, body, kind)


async def _asked(
    client: HttpClient, method: str, path: str, body: bytes | None, kind: str
) -> HttpAnswer:
    answer = await client.ask(method, path, HttpClient.whole, body=body, kind=kind)
    if answer.status not in {http.client.OK, http.client.CREATED}:
        message = values.parse_refusal(bytes(answer.body))
        raise ApiRefused(_named(method, path), answer.status, message, answer.retry_after_s)
    return answer


def _named(method: str, path: str) -> str:
    """Return what was asked, as errors have it."""
    return f"{method} {path.partition('?')[0]}"


def _events(event: PodEvent) -> str:
    return f"/apis/events.k8s.io/v1/namespaces/{quote(event.pod.partition('/')[0], safe='')}/events"


# Restoring affinities on all nodes: one more rollout, in which each daemon releases its sandboxes.
#
# The step is a postStart handler: a pod is ready only after it ended well, and it runs with the
# rights and mounts that the daemon has already. Nothing else of the DaemonSet is read or changed.

STRATEGIC: Final = "application/strategic-merge-patch+json"
LOOK_S: Final = 3.0

LASTING: Final = frozenset(
    {http.client.UNAUTHORIZED, http.client.FORBIDDEN, http.client.UNPROCESSABLE_ENTITY}
)
"""Refusals that another attempt does not change."""


@dataclass
class Rollout:
    """A DaemonSet that is rolled out with the step; `say` shows how far it is.

    `classes`: its pods wrote files of `kata-class`, which they are to remove.
    """

    client: HttpClient
    namespace: str
    name: str
    say: Callable[[str], None]
    classes: bool = False
    _backoff: Backoff = field(default_factory=Backoff)

    @property
    def path(self) -> str:
        """Where the DaemonSet is."""
        return f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets/{self.name}"

    async def release(self, timeout_s: float) -> str:
        """Release all nodes and return the result in words.

        Raises KataPinError if that is refused, or takes too long.
        """
        deadline = time.monotonic() + timeout_s
        found = await self._insist("PATCH", values.encode_release(classes=self.classes), deadline)
        last = ""
        while found is not None:
            wanted, updated, ready = self._progress(found)
            line = f"{min(updated, ready)} of {wanted} nodes released"
            if line != last:
                self.say(line)
            last = line
            if updated >= wanted and ready >= wanted:
                return line
            if time.monotonic() + LOOK_S > deadline:
                raise KataPinError(
                    f"{line} within {timeout_s:g} s",
                    hint="pods that are not ready say why: kubectl describe pod; the others are",
                )
            await asyncio.sleep(LOOK_S)
            found = await self._insist("GET", None, deadline)
        return f"there is no DaemonSet {self.namespace}/{self.name}: nothing to release"

    def _progress(self, answer: HttpAnswer) -> tuple[int, int, int]:
        try:
            return values.parse_rollout(bytes(answer.body))
        except ParseError as error:
            raise KataPinError(f"{self.path}: {error}") from error

    async def _insist(self, method: str, body: bytes | None, deadline: float) -> HttpAnswer | None:
        """Return the answer, None for a DaemonSet that is not there; try again for a while."""
        kind = "" if body is None else STRATEGIC
        while True:
            try:
                answer = await _asked(self.client, method, self.path, body, kind)
            except (ApiRefused, StateError) as error:
                status, after_s = 0, 0.0
                if isinstance(error, ApiRefused):
                    status, after_s = error.status, error.after_s
                if status == http.client.NOT_FOUND:
                    return None
                wait_s = self._backoff.failed(after_s)
                if status in LASTING or time.monotonic() + wait_s > deadline:
                    raise
                self.say(f"{error}; trying again in {wait_s:.0f} s")
                await asyncio.sleep(wait_s)
            else:
                self._backoff.succeeded()
                return answer
