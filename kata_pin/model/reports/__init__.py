"""The report documents: what `--json` prints and what the daemon answers. The only schema.

One module per document; a class is one JSON object. Plain values only: CPU sets are Linux cpu
lists, ages and durations are numbers. The comment at a field (`#:`) is its description in
docs/json.md and docs/schema/, which scripts/schema generates; a description that starts with
"One of" lists every value. wire/reports.py encodes and decodes the classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

VERSION: Final = 2
"""Version of every document. Within a version fields are only added."""

Cpus = Annotated[str, "cpus"]
"""A Linux cpu list such as `0-3,8`; empty: no CPU."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something the operator should know."""

    code: str  #: stable name of the condition
    text: str  #: the same for people
    level: str  #: One of `info`, `warning`
