"""TOML from outside: what is refused before it is parsed, and what is not."""

from __future__ import annotations

import tomllib

import pytest

from kata_pin.base import toml_text
from kata_pin.base.errors import ParseError

LIMIT = toml_text.MAX_DOTS
LONG = "k" + ".k" * (LIMIT + 1)


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG} = 1",
        f"[{LONG}]",
        f"[[{LONG}]]",
        f"a = {{ b = 1, {LONG} = 2 }}",
        f"a = [{{ {LONG} = 2 }}]",
        LONG.replace(".", " . ") + " = 1",
        LONG.replace("k", '"k"') + " = 1",
        LONG.replace("k", "'#'") + " = 1",
        f"a = '#'\n{LONG} = 1",
        f'a = "\\"#"\n{LONG} = 1',
        f'a = ["""x"""", {{ {LONG} = 1 }}]',
        f"a = ['''x'''', {{ {LONG} = 1 }}]",
        f'a = ["""\n# """, {{ {LONG} = 1 }}]',
        f'a = ["""\\""""", {{ {LONG} = 1 }}]',
    ],
)
def test_a_key_with_many_dots_is_refused(text: str) -> None:
    """Wherever it stands: it would take memory in the square of its dots."""
    with pytest.raises(ParseError, match="dots"):
        toml_text.load(text, source="x")


@pytest.mark.parametrize(
    "text",
    [
        f"a = '{LONG}'",
        f'a = "{LONG}"',
        f'a = """{LONG} = [\n{LONG}"""',
        f"a = '''{LONG}\n{LONG}'''",
        f"# {LONG} = 1 [[{LONG}]] ...........",
        f"a = 1 # {LONG}",
        "k" + ".k" * LIMIT + " = 1",
        f'"{LONG}" = 1',
        "a = [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5]",
        "a = 1979-05-27T07:32:00.999999-07:00",
    ],
)
def test_dots_elsewhere_count_for_nothing(text: str) -> None:
    """Texts and comments may have any number of them."""
    assert toml_text.load(text, source="x") == tomllib.loads(text)


def test_many_keys_and_values_are_refused() -> None:
    """A table takes a kilobyte, so their number is bounded; comments are not counted."""
    most = "".join(f"k{n} = 1\n" for n in range(toml_text.MAX_MARKS))
    assert len(toml_text.load(most + "# = = = ,,,", source="x")) == toml_text.MAX_MARKS
    with pytest.raises(ParseError, match="more than 8192 keys and values"):
        toml_text.load(most + "[a]\n", source="x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x" * (toml_text.MAX_CHARACTERS + 1), "longer than"),
        ("a = " + "[" * 3000, "nested too deeply"),
        ("a = 1\na = 2", "not TOML"),
        ('a = """', "not TOML: Unterminated"),
        ("a = " + "1" * 5000, "not TOML"),
    ],
)
def test_errors(text: str, said: str) -> None:
    """Each names the source; a long one is cut."""
    with pytest.raises(ParseError, match=said) as caught:
        toml_text.load(text, source="configuration.toml")
    assert str(caught.value).startswith("configuration.toml: ")
    assert len(str(caught.value)) < 400


def test_a_byte_order_mark_is_skipped() -> None:
    """containerd and Kata read files that begin with one; a second one is no TOML."""
    assert toml_text.load("\ufeffversion = 2\r\n", source="x") == {"version": 2}
    with pytest.raises(ParseError, match="not TOML"):
        toml_text.load("\ufeff\ufeffversion = 2", source="x")
