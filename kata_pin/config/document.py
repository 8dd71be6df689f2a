"""YAML text to plain values: the strict part of YAML that kata-pin accepts.

Scalars stay text, so that `010`, `1:30` and `on` mean what was written. Refused, each with its
line: duplicate keys, anchors and aliases (an alias bomb needs them), tags, keys that are not
scalars, more than one document, nesting deeper than MAX_DEPTH. file.py has bounded the size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import yaml

from kata_pin.config.kinds import Raw
from kata_pin.errors import ParseError

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
