"""Calls of the broker that change many threads at once: affinities, groups, scheduling classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from kata_pin.broker.protocol import (
    MAX_CHANGES,
    MAX_MESSAGE,
    NUMBER,
    REQUEST,
    Change,
    Changed,
    parse_changed,
    render_changes,
    render_group,
)

NO_CPUS: frozenset[int] = frozenset()


class ThreadCalls(ABC):
    """The calls, by requests that are short enough; see Calls for what each does."""

    @abstractmethod
    def _ask(self, letter: bytes, data: bytes, descriptors: Sequence[int] = ()) -> bytes:
        """Return the broker's answer to a request; raises OSError."""

    def set_affinities(self, changes: Sequence[Change], proc: str) -> list[Changed]:
        """See Calls."""
        assert proc == "/proc", "the broker knows the running system only"
        done: list[Changed] = []
        for request in _requests(changes):
            done += parse_changed(self._ask(b"a", request))
        return done

    def set_classes(
        self, changes: Sequence[Change], policy: int, priority: int, proc: str
    ) -> list[Changed]:
        """See Calls."""
        assert proc == "/proc", "the broker knows the running system only"
        head = NUMBER.pack(policy) + NUMBER.pack(priority)
        done: list[Changed] = []
        for request in _requests([one._replace(cpus=NO_CPUS) for one in changes]):
            done += parse_changed(self._ask(b"S", head + request))
        return done

    def make_group(self, class_name: str, name: str) -> None:
        """See Calls."""
        self._ask(b"G", render_group(class_name, name))

    def join_group(self, class_name: str, name: str, threads: Sequence[Change]) -> list[Changed]:
        """See Calls."""
        done: list[Changed] = []
        for request in _requests([one._replace(cpus=NO_CPUS) for one in threads]):
            done += parse_changed(self._ask(b"J", render_group(class_name, name, request)))
        return done

    def remove_group(self, class_name: str, name: str) -> None:
        """See Calls."""
        self._ask(b"R", render_group(class_name, name))


def _requests(changes: Sequence[Change]) -> Iterator[bytes]:
    """Yield requests for changes that are short enough."""
    request = render_changes(changes) if len(changes) <= MAX_CHANGES else b""
    if changes and (not request or len(request) > MAX_MESSAGE - REQUEST.size):
        half = (len(changes) + 1) // 2
        yield from _requests(changes[:half])
        yield from _requests(changes[half:])
    elif changes:
        yield request
