"""Texts made from the settings table: the settings in force, and a sample file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from kata_pin.config.kinds import Raw
from kata_pin.config.table import SECTIONS, SETTINGS, Setting, flow
from kata_pin.config.tree import Config

WIDTH = 96
"""Columns of the sample's comments."""


def as_data(config: Config) -> dict[str, Raw]:
    """Return every setting as nested plain values, as a file would hold them."""
    data: dict[str, Raw] = {"version": "1"}
    for entry in SETTINGS:
        section, dot, name = entry.key.rpartition(".")
        place = data.setdefault(section, {}) if dot else data
        if isinstance(place, dict):
            place[name] = entry.raw(config)
    return data


def as_yaml(config: Config, *, changed_only: bool = False) -> str:
    """Return a file that means exactly `config`; each line that differs from its default says so.

    `changed_only` leaves out what has its default.
    """
    lines = ["version: 1"]
    section = ""
    for entry in SETTINGS:
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
