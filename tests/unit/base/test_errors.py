"""The texts of errors, whatever they quote."""

from __future__ import annotations

from kata_pin.base.errors import ParseError


def test_a_message_can_always_be_written() -> None:
    """Half a surrogate pair, from JSON or from a file's name, is an escape in an error's text."""
    error = ParseError("not a number", source="-smp s\udcf3ckets", text="\ud800")
    assert str(error) == "-smp s\\udcf3ckets: not a number: '\\ud800'"
    error.message.encode()
