"""The rows of the settings table with their keys, in the order of the documents made from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Final, cast

from kata_pin.config.alloc import Alloc
from kata_pin.config.guest import Guest
from kata_pin.config.kinds import Raw
from kata_pin.config.metrics import Metrics
from kata_pin.config.row import METADATA, Row
from kata_pin.config.tree import Audit, Config, History, Hook, Nri, Paths, Qmp

SECTIONS: Final[dict[str, type[object]]] = {
    "paths": Paths,
    "audit": Audit,
    "hook": Hook,
    "qmp": Qmp,
    "nri": Nri,
    "guest": Guest,
    "history": History,
    "alloc": Alloc,
    "metrics": Metrics,
}
"""The sections of a file, by their key."""


_BARE: Final = re.compile(r"/?[a-z][A-Za-z0-9_./-]*\Z|[1-9][0-9]*(\.[0-9]+)?\Z|0\Z")
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
    if _BARE.match(raw):
        return raw
    return '"' + raw.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _rows(cls: type[object], prefix: str) -> Iterator[Setting]:
    if not is_dataclass(cls):
        raise TypeError(f"{cls!r} is not a section")
    for entry in fields(cls):
        if METADATA in entry.metadata:
            yield Setting(prefix + entry.name, cast("Row", entry.metadata[METADATA]))


SETTINGS: Final[tuple[Setting, ...]] = (
    *_rows(Config, ""),
    *(row for name, cls in SECTIONS.items() for row in _rows(cls, f"{name}.")),
)
BY_KEY: Final[dict[str, Setting]] = {entry.key: entry for entry in SETTINGS}
