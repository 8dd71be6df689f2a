"""How a setting is declared: a dataclass field that carries its row of the table.

Nothing here lives longer than the import. Out of scope: which settings exist (tree.py, alloc.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeVar, cast

from kata_pin.config.kinds import Kind

T = TypeVar("T")

METADATA: Final = "kata_pin.setting"
"""Key of a dataclass field's metadata that holds its Row."""


@dataclass(frozen=True)
class Row:
    """What a setting's field carries: everything about it but its key."""

    kind: Kind[object]
    default: object
    help: str
    unit: str = ""
    example: str = ""


def setting(kind: Kind[T], default: T, help_text: str, *, unit: str = "", example: str = "") -> T:
    """Declare one setting as a dataclass field."""
    row = Row(cast("Kind[object]", kind), default, help_text, unit, example)
    made: T = field(default_factory=lambda: default, metadata={METADATA: row})
    return made
