"""The rows of the settings table with their keys, in the order of the documents made from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final, cast

from kata_pin.config.kinds import ROW, Raw, Row
from kata_pin.config.tree import Config

SECTIONS: Final[dict[str, type[object]]] = {
    entry.name: cast("type[object]", entry.default_factory)
    for entry in fields(Config)
    if ROW not in entry.metadata
}
"""The sections of a file, by their key."""

_BARE: Final = r"/?[a-z][A-Za-z0-9_./-]*|[1-9][0-9]*(\.[0-9]+)?|0"
"""Scalars that every YAML reader takes as written."""


@dataclass(frozen=True)
class Setting:
    """A row with its key, such as `audit.deep_s`."""

    key: str
    row: Row

    @property
    def default_text(self) -> str:
        """The default as it is written in a file."""
        return flow(self.row.kind.write(self.row.default))

    def raw(self, config: Config) -> Raw:
        """Return this setting's value in a Config, as a file would have it."""
        return self.row.kind.write(attrgetter(self.key)(config))


def flow(raw: Raw) -> str:
    """Write a value on one line of YAML, quoted where another reader would misread it."""
    if isinstance(raw, list):
        return "[" + ", ".join(flow(item) for item in raw) + "]"
    if isinstance(raw, dict):
        return "{" + ", ".join(f"{flow(k)}: {flow(v)}" for k, v in raw.items()) + "}"
    if re.fullmatch(_BARE, raw):
        return raw
    return '"' + raw.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _rows(cls: type[Any], prefix: str) -> Iterator[Setting]:
    for entry in fields(cls):
        if ROW in entry.metadata:
            yield Setting(prefix + entry.name, entry.metadata[ROW])


SETTINGS: Final[tuple[Setting, ...]] = (
    *_rows(Config, ""),
    *(row for name, cls in SECTIONS.items() for row in _rows(cls, f"{name}.")),
)
BY_KEY: Final[dict[str, Setting]] = {entry.key: entry for entry in SETTINGS}
