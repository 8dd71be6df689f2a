"""No key of more dots than the limit ever reaches tomllib, however it is hidden."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kata_pin.base import toml_text
from kata_pin.base.errors import ParseError

TOKENS = [*"\"'\\#=.,[]{} \nak1", '"""', "'''", '""""', '\\"', "a.b", "a.b.c.d.e.f.g.h.i.j", "\r\n"]
tokens = st.lists(st.sampled_from(TOKENS), max_size=40).map("".join)

keys = st.lists(st.sampled_from(["a", "b1", '"x.y#"', "'z\"'"]), min_size=1, max_size=12).map(
    ".".join
)
texts = st.one_of(
    tokens.map(lambda t: '"' + t.replace("\\", "").replace('"', '\\"').replace("\n", "") + '"'),
    tokens.map(lambda t: "'" + t.replace("'", "").replace("\n", "") + "'"),
    tokens.map(lambda t: '"""' + t.replace("\\", "").replace('"""', '""\\"') + '"""'),
    tokens.map(lambda t: "'''" + t.replace("'''", "") + "'''"),
)
values = st.recursive(
    texts | st.sampled_from(["1", "1.5", "true", "1979-05-27T07:32:00.5Z"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda some: "[" + ", ".join(some) + "]")
        | st.lists(st.tuples(keys, inner), max_size=3).map(
            lambda some: "{" + ", ".join(f"{k} = {v}" for k, v in some) + "}"
        )
    ),
    max_leaves=6,
)
lines = st.one_of(
    st.builds("{} = {}".format, keys, values),
    keys.map("[{}]".format),
    keys.map("[[{}]]".format),
    tokens.map(lambda t: "# " + t.replace("\n", "").replace("\r", "")),
)
documents = st.lists(lines, max_size=5).map("\n".join) | tokens


@contextmanager
def longest_key() -> Iterator[list[int]]:
    """Record how many parts each key has that tomllib reads."""
    module: Any = tomllib._parser  # type: ignore[attr-defined]
    real, parts = module.parse_key, [0]

    def recorded(*arguments: Any) -> Any:
        found = real(*arguments)
        parts.append(len(found[1]))
        return found

    module.parse_key = recorded
    try:
        yield parts
    finally:
        module.parse_key = real


@given(text=documents)
def test_no_long_key_is_parsed(text: str) -> None:
    """Either the document is refused, or every key that tomllib reads is within the limit."""
    read: object = None
    refused = ""
    with longest_key() as parts:
        try:
            read = toml_text.load(text, source="x")
        except ParseError as error:
            refused = str(error)
    assert max(parts) <= toml_text.MAX_DOTS + 1
    if not refused:
        assert read == tomllib.loads(text)
    elif "dots" not in refused:
        try:
            tomllib.loads(text)
        except (ValueError, RecursionError):
            return
        raise AssertionError(f"refused, but it is good TOML: {refused}")
