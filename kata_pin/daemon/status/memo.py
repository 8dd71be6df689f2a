"""What a document needs of each sandbox and what changes with its passes only, kept in between."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """Keeps one value per sandbox for as long as what it was made from is equal."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[object, ...], Value]] = {}

    def get(
        self, sandbox_id: str, made_from: tuple[object, ...], make: Callable[[], Value]
    ) -> Value:
        """Return the value, made anew if something of `made_from` changed."""
        known = self._known.get(sandbox_id)
        if known is None or known[0] != made_from:
            known = self._known[sandbox_id] = made_from, make()
        return known[1]

    def value(self, sandbox_id: str) -> Value:
        """Return the value that `get` returned last."""
        return self._known[sandbox_id][1]

    def keep_only(self, sandbox_ids: Collection[str]) -> None:
        """Drop the values of sandboxes that have ended."""
        if len(self._known) > len(sandbox_ids):
            self._known = {one: self._known[one] for one in sandbox_ids if one in self._known}
