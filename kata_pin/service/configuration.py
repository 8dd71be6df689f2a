"""A configuration file to a Config; every error names the file and the key.

A reload calls `load` again. The settings themselves are in base/config/tree.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Iterator, Mapping
from typing import Any, Final, NoReturn

import yaml
from msgspec import Struct, field

from kata_pin.base.config.kinds import Raw
from kata_pin.base.config.options import announced
from kata_pin.base.config.table import BY_KEY, SECTIONS, Setting, rows
from kata_pin.base.config.tree import Config
from kata_pin.base.errors import ConfigError, ParseError

DEFAULT_FILE: Final = "/etc/kata-pin/config.yaml"
"""Read when no other file is named; its absence means the defaults."""

MAX_BYTES: Final = 64 * 1024
"""Longest file accepted."""

MAX_ERRORS: Final = 100
"""Most errors of one file that are reported."""

VERSION: Final = "1"
"""The only version of the file's form so far."""


def load(file: str | None = None, *, default: str = DEFAULT_FILE) -> Config:
    """Read a file; None means the default one, which may be absent.

    Raises ConfigError, also for a named file that does not exist.
    """
    chosen = default if file is None else file
    try:
        text = read_text(chosen)
    except FileNotFoundError as error:
        if file is None:
            return Config()
        raise ConfigError("no such file", file=chosen) from error
    return from_text(text, chosen)


def read_text(file: str) -> str:
    """Return a file's text, at most MAX_BYTES of UTF-8; raises ConfigError, FileNotFoundError."""
    try:
        # O_NONBLOCK: opening a FIFO without a writer would hang.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError("not a regular file", file=file)
            with open(descriptor, "rb", closefd=False) as opened:
                body = opened.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read it: {error.strerror}", file=file) from error
    if len(body) > MAX_BYTES:
        raise ConfigError(f"larger than {MAX_BYTES // 1024} KiB", file=file)
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start}", file=file) from error


class FileReading(Struct, frozen=True):
    """What a file means, with every error in it; a setting that is wrong has its default."""

    config: Config
    errors: tuple[ConfigError, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)

    def line_of(self, key: str) -> int:
        """Return the line of a setting or of the section that it is in, 0 if the file has none."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key, 0)


def from_text(text: str, file: str = "") -> Config:
    """Return the Config that a file's text means; raises ConfigError for the first error in it."""
    return _valid(read(text, file))


def read(text: str, file: str = "") -> FileReading:
    """Return what a file's text means, and everything that is wrong with it."""
    lines: dict[str, int] = {}
    try:
        raw = parse(text, lines)
    except ParseError as error:
        return FileReading(Config(), (_placed(error, file),))
    return _meaning(raw, file, lines)


def from_data(data: Mapping[str, object]) -> Config:
    """Return the Config that table.as_data wrote as plain values; raises ConfigError."""
    return _valid(_meaning(_as_raw(data), "", {}))


def _valid(reading: FileReading) -> Config:
    for error in reading.errors:
        raise error
    return reading.config


def _as_raw(value: object) -> Raw:
    """Return a plain value as a file would have it."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.6f}".rstrip("0").rstrip(".")
        case Mapping():
            return {str(key): _as_raw(one) for key, one in value.items()}
        case list() | tuple():
            return [_as_raw(one) for one in value]
        case _:
            return str(value)


def _meaning(raw: Raw, file: str, lines: Mapping[str, int]) -> FileReading:
    """Return what a document's values mean, and everything that is wrong with them."""
    if raw == "":
        return FileReading(Config())
    if not isinstance(raw, dict):
        wrong = ConfigError("expected settings, one `key: value` per line", file=file)
        return FileReading(Config(), (wrong,))
    raw = dict(raw)
    version = raw.pop("version", None)
    if version is None:
        wrong = ConfigError("missing", file=file, key="version", hint="write `version: 1` first")
        return FileReading(Config(), (wrong,))
    if version != VERSION:
        wrong = ConfigError(f"expected {VERSION}, the only version known", file=file, key="version")
        return FileReading(Config(), (wrong,))
    errors: list[ConfigError] = []
    values: dict[str, object] = {}
    added = dict(_added(raw, file, errors))
    known = BY_KEY | {row.key: row for name, cls in added.items() for row in rows(cls, f"{name}.")}
    for key, value in _flat(raw, {*SECTIONS, *added}, file, errors):
        try:
            values[key] = _read(key, value, known, file)
        except ConfigError as error:
            errors.append(error)
        if len(errors) >= MAX_ERRORS:
            break
    while True:
        try:
            return FileReading(_config(values, added), tuple(errors), lines)
        except ConfigError as error:  # settings that contradict each other
            errors.append(_placed(error, file, error.key, error.hint))
            wrong_part = error.key.partition(".")[0]
            left = {k: v for k, v in values.items() if k.partition(".")[0] != wrong_part}
            if left == values:  # another package's defaults
                return FileReading(Config(), tuple(errors), lines)
            values = left


def _added(
    raw: dict[str, Raw], file: str, errors: list[ConfigError]
) -> Iterator[tuple[str, type[Struct]]]:
    """Yield the sections of other packages' options; take out of `raw` what cannot be loaded."""
    unknown = [name for name in raw if name not in SECTIONS and name not in BY_KEY]
    for name in unknown:
        try:
            option = announced(name) if isinstance(raw[name], dict) or raw[name] == "" else None
        except ConfigError as error:
            errors.append(_placed(error, file, name))
            del raw[name]
        else:
            if option is not None:
                yield name, option.settings


def _flat(
    raw: dict[str, Raw], sections: Container[str], file: str, errors: list[ConfigError]
) -> Iterator[tuple[str, Raw]]:
    """Yield each setting by its key; add to `errors` what stands for a section and is none."""
    for name, value in raw.items():
        if "." in name:
            wrong = f"write `{name.rpartition('.')[2]}` in the section {name.rpartition('.')[0]}"
            errors.append(ConfigError("not a key", file=file, key=name, hint=wrong))
        elif name not in sections:
            yield name, value
        elif isinstance(value, dict):
            for key, one in value.items():
                yield f"{name}.{key}", one
        elif value != "":
            errors.append(ConfigError("expected a section of settings", file=file, key=name))


def _config(values: Mapping[str, object], added: Mapping[str, type[Struct]]) -> Config:
    """Return the tree of settings by their keys; raises ConfigError for contradictions."""
    tree: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    for name, section in {**SECTIONS, **added}.items():
        inner = {
            k.removeprefix(f"{name}."): v for k, v in values.items() if k.startswith(f"{name}.")
        }
        tree[name] = section(**inner)
    others = {name: tree.pop(name) for name in added}
    return Config(**tree, added=others)


def _read(key: str, value: Raw, known: Mapping[str, Setting], file: str) -> object:
    if key not in known:
        _refuse_unknown(key, file, known)
    kind = known[key].row.kind
    try:
        return kind.read(value)
    except ParseError as error:
        raise _placed(error, file, key) from error


def _placed(
    error: ParseError | ConfigError, file: str, key: str = "", hint: str = ""
) -> ConfigError:
    """Return an error with its file and its key."""
    return ConfigError(error.message.removeprefix(f"{key}: "), file=file, key=key, hint=hint)


def _refuse_unknown(key: str, file: str, known_keys: Mapping[str, Setting]) -> NoReturn:
    """Raise ConfigError that names the nearest setting, also one of another section."""
    from difflib import get_close_matches  # noqa: PLC0415 - on the way to an error only

    last = key.rpartition(".")[2]
    near = get_close_matches(key, known_keys, n=1, cutoff=0.7)
    elsewhere = [known for known in known_keys if known.rpartition(".")[2] == last]
    found = next(iter([*elsewhere, *near, *get_close_matches(key, SECTIONS, n=1)]), None)
    hint = f"did you mean {found}?" if found else "kata-pin config sample lists every setting"
    raise ConfigError("no such setting", file=file, key=key, hint=hint)


# YAML text to plain values: the strict part of YAML that kata-pin accepts.
#
# Scalars stay text, so that `010`, `1:30` and `on` mean what was written. Refused, each with its
# line: duplicate keys, anchors and aliases (an alias bomb needs them), tags, keys that are not
# scalars, more than one document, nesting deeper than MAX_DEPTH. read_text bounds the size.

MAX_DEPTH: Final = 8
"""Deepest nesting accepted; the deepest setting needs three levels."""

LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser where PyYAML was built with it: ten times as fast on the sample file."""

_NODES: Final = (yaml.ScalarEvent, yaml.SequenceStartEvent, yaml.MappingStartEvent)
_TAGS: Final = {None, "!", "tag:yaml.org,2002:str"}


Lines = dict[str, int]
"""The line of each key, by the keys that lead to it, joined by dots."""


def parse(text: str, lines: Lines | None = None) -> Raw:
    """Return the document's values; an empty document is an empty text.

    `lines` gets the line of each key. Raises ParseError with the line for text that is not YAML, or
    not the part accepted here.
    """
    try:
        return _document(yaml.parse(text, Loader=LOADER), {} if lines is None else lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}: " if mark is not None else ""
        raise ParseError(f"{place}{error.problem or error.context or 'not YAML'}") from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ParseError(f"not YAML: {str(error).splitlines()[0]}") from error


def _document(events: Iterator[yaml.Event], lines: Lines) -> Raw:
    next(events)  # the stream's start
    if isinstance(next(events), yaml.StreamEndEvent):
        return ""
    value = _value(next(events), events, lines, ())
    next(events)  # the document's end
    after = next(events)
    if not isinstance(after, yaml.StreamEndEvent):
        raise ParseError(f"line {_line(after)}: only one document is accepted")
    return value


def _value(
    event: yaml.Event, events: Iterator[yaml.Event], lines: Lines, path: tuple[str, ...]
) -> Raw:
    """Return the value at a path that begins with `event`; ParseError for what is refused."""
    line = _line(event)
    if not isinstance(event, _NODES) or event.anchor is not None:
        raise ParseError(f"line {line}: anchors and aliases are not accepted")
    if len(path) >= MAX_DEPTH:
        raise ParseError(f"line {line}: nested deeper than {MAX_DEPTH} levels")
    if event.tag not in _TAGS:
        raise ParseError(f"line {line}: tags are not accepted", text=str(event.tag))
    if isinstance(event, yaml.ScalarEvent):
        return str(event.value)
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Raw] = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            lines[".".join((*path, str(len(items))))] = _line(item)
            items.append(_value(item, events, lines, (*path, str(len(items)))))
        return items
    values: dict[str, Raw] = {}
    while not isinstance(start := next(events), yaml.MappingEndEvent):
        key = _value(start, events, lines, (*path, ""))
        if not isinstance(key, str):
            raise ParseError(f"line {_line(start)}: a key must be a word")
        if key in values:
            raise ParseError(f"line {_line(start)}: duplicate key", text=key)
        lines[".".join((*path, key))] = _line(start)
        values[key] = _value(next(events), events, lines, (*path, key))
    return values


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 0
