"""`show --memory` on a terminal, with names that pods chose."""

from __future__ import annotations

from msgspec.structs import replace

from kata_pin.cli.render.layout import Output
from kata_pin.options.memory.report import memory_memory
from tests.unit.cli import documents as docs


def test_no_name_reaches_the_terminal_as_it_is() -> None:
    """Neither in the table nor in what is said of memory that moves, is far, or is not known."""
    found = docs.remembered()
    hostile = tuple(replace(one, pod="shop/\x1b[31mweb") for one in found.sandboxes)
    lines = memory_memory(replace(found, sandboxes=hostile), Output(200))
    text = "\n".join(one.plain for one in lines)
    assert text.count("\\x1b[31mweb") == 7
    assert "\x1b" not in text
