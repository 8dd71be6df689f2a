"""YAML text to plain text values: the strict part of YAML that kata-pin accepts.

Scalars stay text, so that `010`, `1:30` and `on` mean what was written. Refused, each
with its line: duplicate keys, anchors and aliases (an alias bomb needs them), tags, keys that are
not scalars, more than one document, nesting deeper than MAX_DEPTH. The size is bounded by the
caller before it comes here (file.py). Out of scope: what the keys mean.
"""

from __future__ import annotations

from typing import Final

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from kata_pin.config.kinds import Raw
from kata_pin.errors import ParseError

MAX_DEPTH: Final = 8
"""Deepest nesting accepted; the deepest setting needs three levels."""

_TEXT: Final = "tag:yaml.org,2002:str"
_PLAIN_TAGS: Final = {_TEXT, "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}


class _Loader(yaml.SafeLoader):
    """A SafeLoader that resolves every scalar to text and composes no aliases."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the name and form that PyYAML looks up

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        """Compose one node; ParseError for what the module's docstring refuses."""
        event = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's parser is untyped
        line = event.start_mark.line + 1
        if getattr(event, "anchor", None) is not None:
            raise ParseError(f"line {line}: anchors and aliases are not accepted")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError(f"line {line}: nested deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if node is not None and node.tag not in _PLAIN_TAGS:
            raise ParseError(f"line {line}: tags are not accepted", text=node.tag)
        return node


def parse(text: str) -> Raw:
    """Return the document's values; an empty document is an empty text.

    Raises ParseError with the line for text that is not YAML, or not the part accepted here.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}: " if mark is not None else ""
        raise ParseError(f"{place}{error.problem or error.context or 'not YAML'}") from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ParseError(f"not YAML: {str(error).splitlines()[0]}") from error
    return "" if node is None else _values(node)


def _values(node: Node) -> Raw:
    if isinstance(node, ScalarNode):
        return str(node.value)
    if isinstance(node, SequenceNode):
        return [_values(item) for item in node.value]
    if not isinstance(node, MappingNode):
        raise ParseError(f"line {node.start_mark.line + 1}: not a value, a list or a mapping")
    values: dict[str, Raw] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, ScalarNode):
            raise ParseError(f"line {line}: a key must be a word")
        if key.value in values:
            raise ParseError(f"line {line}: the key is there twice", text=key.value)
        values[key.value] = _values(value)
    return values
