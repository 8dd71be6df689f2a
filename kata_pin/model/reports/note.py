"""Notes: what an operator should know, in several documents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """Something the operator should know."""

    code: str  #: stable name of the condition
    text: str  #: the same for people
    level: str  #: One of `info`, `warning`
