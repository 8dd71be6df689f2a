"""The table of settings and the texts made from it."""

from dataclasses import fields, replace
from operator import attrgetter
from types import MappingProxyType

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kata_pin.config import Audit, Config, Hook, Intruders, Mode, Nri, NriEnabled, Paths, from_text
from kata_pin.config.kinds import ROW
from kata_pin.config.table import BY_KEY, SECTIONS, SETTINGS, Setting, flow
from kata_pin.config.text import as_data, as_yaml, sample
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.settings import ExclusiveMode, Overhead, OverheadKind
from kata_pin.model.thread import ThreadRole

KEYS = pytest.mark.parametrize("entry", SETTINGS, ids=lambda entry: entry.key)

cpu_lists = st.sets(st.integers(0, 300), min_size=1, max_size=20).map(CpuSet)
overheads = st.one_of(
    st.sampled_from(["auto", "sandbox", "leave"]).map(lambda w: Overhead(OverheadKind(w))),
    st.integers(1, 64).map(lambda k: Overhead(OverheadKind.RESERVE, reserve=k)),
    cpu_lists.map(lambda c: Overhead(OverheadKind.CPUS, cpus=c)),
)
paths = st.from_regex(r"/[A-Za-z0-9 :#'\"\\\[\]{}é-]{0,20}[A-Za-z0-9]", fullmatch=True)
names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
configs = st.builds(
    Config,
    mode=st.sampled_from(Mode),
    runtime_dir=paths,
    group=names,
    hypervisors=st.lists(paths, max_size=3).map(tuple),
    overhead=overheads,
    overhead_roles=st.dictionaries(st.sampled_from(ThreadRole), overheads, max_size=4).map(
        MappingProxyType
    ),
    housekeeping=cpu_lists | st.just(EMPTY),
    exclusive_handlers=st.dictionaries(names, st.sampled_from(ExclusiveMode), max_size=3).map(
        MappingProxyType
    ),
    intruders=st.sampled_from(Intruders),
    paths=st.builds(Paths, vc=paths, bundle_roots=st.lists(paths, max_size=3).map(tuple)),
    audit=st.builds(
        Audit,
        affinity_s=st.integers(1, 600_000).map(lambda n: max(0.1, n / 10_000)),
        deep_s=st.integers(61, 86400).map(float),
    ),
    nri=st.builds(
        Nri,
        enabled=st.sampled_from(NriEnabled),
        index=st.integers(0, 99).map("{:02}".format),
    ),
    hook=st.builds(Hook, pin_ms=st.integers(0, 10000), strict=st.booleans()),
)


@given(configs)
@settings(deadline=None)  # more than a hundred settings are drawn
def test_any_config_survives_its_own_text(config: Config) -> None:
    """What `config show` prints reads back as the same Config, whole or changed lines only."""
    assert from_text(as_yaml(config)) == config
    assert from_text(as_yaml(config, changed_only=True)) == config


@given(configs)
@settings(deadline=None)  # more than a hundred settings are drawn
def test_any_config_is_plain_yaml(config: Config) -> None:
    """The text is YAML for every other reader too."""
    assert set(yaml.safe_load(as_yaml(config))) == set(as_data(config))


def test_every_field_is_a_row_or_a_section() -> None:
    """No field of the tree is missing in the table."""
    for entry in fields(Config):
        assert ROW in entry.metadata or entry.name in SECTIONS
    for name, section in SECTIONS.items():
        assert isinstance(attrgetter(name)(Config()), section)
        assert all(ROW in entry.metadata for entry in fields(section))  # type: ignore[arg-type]


@KEYS
def test_defaults_read_back(entry: Setting) -> None:
    """A row's default is the tree's default, and its text reads back as itself."""
    row = entry.row
    assert attrgetter(entry.key)(Config()) == row.default
    assert row.kind.read(row.kind.write(row.default)) == row.default


@KEYS
def test_every_row_is_explained(entry: Setting) -> None:
    """Help and the words of its kind exist; durations have a unit in the row and in the name."""
    assert entry.row.help
    assert not entry.row.help.endswith(".")
    assert entry.row.kind.words
    suffix = {"milliseconds": "_ms", "seconds": "_s"}.get(entry.row.unit)
    assert suffix is None or entry.key.endswith(suffix)


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
