"""The table of settings and the texts made from it."""

from operator import attrgetter

import pytest
import yaml
from msgspec.structs import fields, replace

from kata_pin.base.config.kinds import SettingRow
from kata_pin.base.config.table import (
    BY_KEY,
    SECTIONS,
    SETTINGS,
    Setting,
    as_data,
    as_yaml,
    flow,
    sample,
)
from kata_pin.base.config.tree import Audit, Config
from kata_pin.service.configuration import from_text

KEYS = pytest.mark.parametrize("entry", SETTINGS, ids=lambda entry: entry.key)


def test_every_field_is_a_row_or_a_section() -> None:
    """No field of the tree is missing in the table."""
    for entry in fields(Config):
        known = isinstance(entry.default_factory, SettingRow) or entry.name in SECTIONS
        assert known or entry.name == "added"  # sections of options of other packages
    for name, section in SECTIONS.items():
        assert isinstance(attrgetter(name)(Config()), section)
        assert all(isinstance(entry.default_factory, SettingRow) for entry in fields(section))


@KEYS
def test_defaults_read_back(entry: Setting) -> None:
    """A row's default is the tree's default, and its text reads back as itself."""
    row = entry.row
    assert attrgetter(entry.key)(Config()) == row.default
    assert row.kind.read(row.kind.write(row.default)) == row.default


@KEYS
def test_every_row_is_explained(entry: Setting) -> None:
    """Help and the words of its kind exist; durations have the same unit there and in the name."""
    assert entry.row.help
    assert not entry.row.help.endswith(".")
    assert entry.row.kind.words
    assert entry.key.endswith("_ms") == ("of milliseconds" in entry.row.kind.words)
    assert entry.key.endswith("_s") == ("of seconds" in entry.row.kind.words)


@KEYS
def test_every_default_and_example_is_in_the_sample(entry: Setting) -> None:
    """The sample shows each setting with its default."""
    name = entry.key.rpartition(".")[2]
    lines = [line.lstrip("# ") for line in sample().splitlines()]
    assert f"{name}: {entry.default_text}" in lines
    if entry.row.example:
        assert f"for example {entry.row.example}" in lines


@KEYS
def test_examples_are_accepted(entry: Setting) -> None:
    """What the documents show as an example is a legal value that differs from the default."""
    if not entry.row.example:
        return
    section, dot, name = entry.key.rpartition(".")
    body = f"{section}: {{{name}: {entry.row.example}}}" if dot else f"{name}: {entry.row.example}"
    config = from_text(
        f"version: 1\nhousekeeping: 0-1\n{body}"
        if name != "housekeeping"
        else f"version: 1\n{body}"
    )
    assert attrgetter(entry.key)(config) != entry.row.default


def test_sample_is_the_defaults() -> None:
    """The sample as shipped changes nothing."""
    assert from_text(sample()) == Config()


@KEYS
def test_sample_works_when_a_line_is_uncommented(entry: Setting) -> None:
    """Removing the # of one setting's line gives a legal file."""
    name = entry.key.rpartition(".")[2]
    wanted = f"{name}: {entry.default_text}"
    lines = [
        line[1:] if line.startswith("#") and line[1:].strip() == wanted else line
        for line in sample().splitlines()
    ]
    assert lines != sample().splitlines()
    assert from_text("\n".join(lines)) == Config()


def test_changed_lines_name_the_default() -> None:
    """`config show` says what a changed setting would be by default."""
    text = as_yaml(replace(Config(), audit=Audit(affinity_s=2.5)))
    assert "  affinity_s: 2.5  # default: 10\n" in text
    assert text.count("# default") == 1


def test_sections_hold_only_their_rows() -> None:
    """Keys are unique, and a dotted key belongs to a section."""
    assert len(BY_KEY) == len(SETTINGS)
    assert {key.partition(".")[0] for key in BY_KEY if "." in key} == set(SECTIONS)


@pytest.mark.parametrize(
    "text", ["", "a b", "0-3", "1:30", "on # x", "[x]", "a: b", '"', "\\", "*x"]
)
def test_awkward_texts_are_quoted(text: str) -> None:
    """A scalar that YAML would read otherwise is quoted, and reads back."""
    assert yaml.safe_load(f"a: {flow(text)}") == {"a": text}


def test_numbers_are_not_quoted() -> None:
    """Any YAML reader takes them as numbers, as ours does; a document has them as such."""
    config = replace(Config(), audit=Audit(affinity_s=0.5))
    assert "  affinity_s: 0.5  # default: 10\n" in as_yaml(config)
    data = as_data(config)
    assert (data["version"], data["audit"]["affinity_s"]) == (1, 0.5)
    assert data["guest"]["enabled"] is True
    assert data["housekeeping"] == ""
