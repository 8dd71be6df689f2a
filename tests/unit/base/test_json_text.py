"""JSON from outside: bounds, types, and errors that name the place."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.base.json_text import MAX_BYTES, MAX_VALUES, Fields, load, load_fields


def fields(text: str) -> Fields:
    return load_fields(text.encode(), source="doc")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "not JSON", id="empty"),
        pytest.param(b"{", "not JSON", id="cut"),
        pytest.param(b"\xff", "not JSON", id="not UTF-8"),
        pytest.param(b'{"a":1,"a":2}', "twice", id="key repeated"),
        pytest.param(b'{"b":{"a":1,"a":1}}', "twice", id="key repeated inside"),
        pytest.param(
            b'{"a":{"\\ud800":1}}', "half of a surrogate pair in a key", id="half a pair in a key"
        ),
        pytest.param(b"[NaN]", "NaN", id="NaN"),
        pytest.param(b"[-Infinity]", "Infinity", id="Infinity"),
        pytest.param(b"[" * 50_000, "nested too deeply", id="depth bomb"),
        pytest.param(b'{"a":' * 50_000, "nested too deeply", id="depth bomb of objects"),
        pytest.param(b"[]," * MAX_VALUES, "more than 200000 values", id="many lists"),
        pytest.param(b"[" + b"0," * MAX_VALUES, "more than 200000 values", id="many numbers"),
        pytest.param(b" " * (MAX_BYTES + 1), "longer than", id="too long"),
        pytest.param(b"[" + b"9" * 100_000 + b"]", "not JSON", id="absurd number"),
    ],
)
def test_load_refuses(data: bytes, message: str) -> None:
    """A document that is none, or is made to hurt, is a ParseError in little time."""
    start = time.process_time()
    with pytest.raises(ParseError, match=rf"^doc: .*{message}"):
        load(data, source="doc")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "text",
    [
        ",[{" * MAX_VALUES,
        '",' * MAX_VALUES,
        "\\," * MAX_VALUES,
        '\\",\\' * MAX_VALUES,
        '"' * 99 + ",",
    ],
    ids=["marks", "quotes", "backslashes", "both", "few"],
)
def test_texts_do_not_count(text: str) -> None:
    """Commas and brackets in keys and texts are no values, whatever is escaped beside them."""
    document = {text: [text, "x" * 65_530, text, {"a": text}]}
    data = json.dumps(document).encode()
    assert load(data, source="doc", limit=1 << 24, values=6) == document
    with pytest.raises(ParseError, match="more than 5 values"):
        load(data, source="doc", limit=1 << 24, values=5)


@pytest.mark.parametrize(
    "filler",
    [b'"', b'\\"', b"\\", b'",', b',"', b"\\,", b'"",', b',""  '],
)
def test_counting_is_linear(filler: bytes) -> None:
    """A document made of quotes and escapes alone is refused in little time and memory."""
    data = b"[," + filler * (MAX_BYTES // len(filler) - 1)
    start = time.process_time()
    with pytest.raises(ParseError):
        load(data, source="doc", values=1)
    assert time.process_time() - start < 2
    tracemalloc.start()
    try:
        with pytest.raises(ParseError):
            load(data[:1_000_000], source="doc", values=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000


def test_limits_are_the_callers() -> None:
    """A caller can ask for less."""
    with pytest.raises(ParseError, match="longer than 3 bytes"):
        load(b"1234", source="doc", limit=3)
    with pytest.raises(ParseError, match="more than 1 values"):
        load(b"[[]]", source="doc", values=1)


def test_chosen_texts() -> None:
    """Only the keys that are asked for are looked at."""
    doc = fields('{"a":"x","b":1,"c":null,"d":"y"}')
    assert doc.chosen(("d", "a", "none")) == {"a": "x", "d": "y"}
    with pytest.raises(ParseError, match="doc: b: not a text"):
        doc.chosen(("a", "b"))


def test_getters() -> None:
    """Each getter returns its type, and a value for what is absent or null."""
    doc = fields('{"t":"x","n":3,"f":true,"o":{"k":"v"},"l":[{"a":1}],"z":null}')
    assert (doc.text("t"), doc.text("z"), doc.text("none")) == ("x", "", "")
    assert (doc.number("n", 0, 9), doc.number("z", 0, 9)) == (3, None)
    assert (doc.flag("f"), doc.flag("z")) == (True, False)
    assert (doc.texts("o"), doc.texts("z")) == ({"k": "v"}, {})
    assert [entry.number("a", 0, 1) for entry in doc.objects("l")] == [1]
    assert doc.objects("z") == []
    assert doc.fields("z").names == []
    assert "t" in doc
    assert "none" not in doc


@pytest.mark.parametrize(
    ("text", "getter", "message"),
    [
        ('{"a":{"b":1}}', lambda d: d.fields("a").text("b"), "doc: a.b: not a text"),
        ('{"a":true}', lambda d: d.number("a", 0, 9), "doc: a: not an integer"),
        ('{"a":1.0}', lambda d: d.number("a", 0, 9), "doc: a: not an integer"),
        ('{"a":10}', lambda d: d.number("a", 0, 9), "doc: a: not within 0 to 9"),
        ('{"a":1}', lambda d: d.flag("a"), "doc: a: not true or false"),
        ('{"a":1}', lambda d: d.fields("a"), "doc: a: not an object"),
        ('{"a":{}}', lambda d: d.items("a"), "doc: a: not a list"),
        ('{"a":[1,2]}', lambda d: d.items("a", limit=1), "doc: a: more than 1 entries"),
        ('{"a":[{},1]}', lambda d: d.objects("a"), "doc: a[1]: not an object"),
        ('{"a":{"x":1}}', lambda d: d.texts("a"), "doc: a.x: not a text"),
        ('{"a":{"x":"","y":""}}', lambda d: d.texts("a", limit=1), "doc: a: more than 1 entries"),
        ('{"a":"xyz"}', lambda d: d.text("a", limit=2), "doc: a: longer than 2 characters"),
        ('{"a":"\\ud800"}', lambda d: d.text("a"), "doc: a: half of a surrogate pair"),
        ('{"a":null}', lambda d: d.need("a"), "doc: a: missing"),
        ('{"a":1,"A":1}', lambda d: d.folded(), "doc: two keys differ only by case"),
    ],
)
def test_errors_name_the_place(text: str, getter: object, message: str) -> None:
    """A wrong value is a ParseError with the path to it."""
    assert callable(getter)
    with pytest.raises(ParseError) as caught:
        getter(fields(text))
    assert str(caught.value) == message


def test_not_an_object() -> None:
    """A document that is a list or a number has no members."""
    with pytest.raises(ParseError, match=r"^doc: not an object$"):
        fields("[1]")


def test_an_emoji_is_a_text() -> None:
    """A whole surrogate pair is one character and no error."""
    assert fields('{"a":"\\ud83d\\ude00"}').text("a") == "\U0001f600"


@pytest.mark.parametrize(
    "element",
    [
        pytest.param(b"[]", id="lists"),
        pytest.param(b'{"a":0}', id="objects"),
        pytest.param(b'"abcdefgh"', id="texts"),
        pytest.param(b"1.5e300", id="numbers"),
        pytest.param(b'"' + "\U0001f600".encode() * 4 + b'"', id="wide texts"),
    ],
)
def test_memory_is_bounded(element: bytes) -> None:
    """The worst document that is accepted takes a bounded multiple of its size."""
    count = MAX_VALUES // (2 if element[:1] in b"[{" else 1) - 2
    data = b"[" + b",".join([element] * count) + b"]"
    assert len(data) < MAX_BYTES
    tracemalloc.start()
    try:
        load(data, source="doc")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024 * 1024
