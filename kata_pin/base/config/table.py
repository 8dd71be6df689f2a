"""The rows of the settings table with their keys, in the order of the documents made from it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields

from kata_pin.base.config.kinds import Raw, SettingRow
from kata_pin.base.config.tree import Config

SECTIONS: Final[dict[str, type[Struct]]] = {
    entry.name: entry.default_factory
    for entry in fields(Config)
    if isinstance(entry.default_factory, type) and issubclass(entry.default_factory, Struct)
}
"""The sections of a file, by their key."""

_BARE: Final = r"/?[a-z][A-Za-z0-9_./-]*|(0|[1-9][0-9]*)(\.[0-9]+)?"
"""Scalars that every YAML reader takes as written."""


class Setting(Struct, frozen=True):
    """A row with its key, such as `audit.deep_s`."""

    key: str
    row: SettingRow

    @property
    def default_text(self) -> str:
        """The default as it is written in a file."""
        return flow(self.row.kind.write(self.row.default))

    def value(self, config: Config) -> object:
        """Return this setting's value in a Config."""
        section, _, name = self.key.rpartition(".")
        added = config.added.get(section)
        return attrgetter(self.key)(config) if added is None else getattr(added, name)

    def raw(self, config: Config) -> Raw:
        """Return this setting's value in a Config, as a file would have it."""
        return self.row.kind.write(self.value(config))

    def data(self, config: Config) -> Raw | bool | float:
        """Return the value for a program: a number or a boolean as such, else as in a file."""
        value = self.value(config)
        return value if isinstance(value, bool | int | float) else self.row.kind.write(value)


def flow(raw: Raw) -> str:
    """Write a value on one line of YAML, quoted where another reader would misread it."""
    if isinstance(raw, list):
        return "[" + ", ".join(flow(item) for item in raw) + "]"
    if isinstance(raw, dict):
        return "{" + ", ".join(f"{flow(k)}: {flow(v)}" for k, v in raw.items()) + "}"
    if re.fullmatch(_BARE, raw):
        return raw
    return '"' + raw.replace("\\", "\\\\").replace('"', '\\"') + '"'


def rows(cls: type[Any], prefix: str) -> Iterator[Setting]:
    """Yield the settings that are fields of a class; the prefix is its section with a dot."""
    for entry in fields(cls):
        if isinstance(entry.default_factory, SettingRow):
            yield Setting(prefix + entry.name, entry.default_factory)


SETTINGS: Final[tuple[Setting, ...]] = (
    *rows(Config, ""),
    *(row for name, cls in SECTIONS.items() for row in rows(cls, f"{name}.")),
)
BY_KEY: Final[dict[str, Setting]] = {entry.key: entry for entry in SETTINGS}


def settings_of(config: Config) -> Iterator[Setting]:
    """Yield every setting, and those of other packages' options that a Config has."""
    yield from SETTINGS
    for name, section in config.added.items():
        yield from rows(type(section), f"{name}.")


WIDTH = 96
"""Columns of the sample's comments."""


def as_data(config: Config) -> dict[str, Any]:
    """Return every setting as nested plain values, for a document."""
    data: dict[str, Any] = {"version": 1}
    data |= {name: {} for name in config.added}
    for entry in settings_of(config):
        section, dot, name = entry.key.rpartition(".")
        place = data.setdefault(section, {}) if dot else data
        place[name] = entry.data(config)
    return data


def as_yaml(config: Config, *, changed_only: bool = False) -> str:
    """Return a file that means exactly `config`; each line that differs from its default says so.

    `changed_only` leaves out what has its default.
    """
    lines = ["version: 1"]
    section = ""
    for entry in settings_of(config):
        value = flow(entry.raw(config))
        changed = value != entry.default_text
        if changed_only and not changed:
            continue
        parent, dot, name = entry.key.rpartition(".")
        if parent != section:
            section = parent
            lines.append(f"{section}:")
        mark = f"  # default: {entry.default_text}" if changed else ""
        lines.append(f"{'  ' if dot else ''}{name}: {value}{mark}")
    return "\n".join(lines) + "\n"


def sample() -> str:
    """Return a file with every setting, explained and commented out; it means `Config()`."""
    lines = ["# Settings of kata-pin. Commented lines show the defaults.", "version: 1"]
    section = ""
    for entry in SETTINGS:
        parent = entry.key.rpartition(".")[0]
        if parent != section:
            section = parent
            title = (SECTIONS[section].__doc__ or "").partition("\n")[0]
            lines += ["", f"# {title}", f"{section}:"]
        lines += ["", *_explained(entry)]
    return "\n".join(lines) + "\n"


def _explained(entry: Setting) -> Iterator[str]:
    """Yield the comment of one setting, then the setting itself with its default."""
    row = entry.row
    about = f"{row.help} ({row.kind.words})"
    indent = "  " if "." in entry.key else ""
    yield from textwrap.wrap(
        about, WIDTH, initial_indent=f"# {indent}", subsequent_indent=f"# {indent}"
    )
    if row.example:
        yield f"# {indent}for example {row.example}"
    yield f"#{indent}{entry.key.rpartition('.')[2]}: {entry.default_text}"
