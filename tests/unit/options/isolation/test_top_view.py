"""Keys of `top` and what they do to the view: pure, one key at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kata_pin.options.isolation.top import KEYS, MAX_FILTER, ORDERS, View, keys
from tests.unit.cli import documents as docs


def after(typed: str, view: View | None = None) -> View:
    view = view or View()
    for key in keys(typed):
        view = view.pressed(key, 10)
    return view


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("q", ["q"]),
        ("\x1b[A\x1b[B", ["up", "down"]),
        ("\x1bOA", ["up"]),
        ("\x1b[5~x\x1b[6~", ["pgup", "x", "pgdn"]),
        ("\x1b[1~\x1b[F", ["home", "end"]),
        ("\x1b", ["esc"]),
        ("\r\x7f ", ["enter", "backspace", "space"]),
        ("\x1b[200~", []),
        ("\x1b[", []),
        ("\x1b[<35;10;10M", []),
        ("\x00\x01", []),
        ("é", ["é"]),
    ],
)
def test_keys_of_a_terminal(typed: str, names: list[str]) -> None:
    """Sequences of xterm and of the Linux console; unknown ones are passed over whole."""
    assert list(keys(typed)) == names


def test_sorting_walks_through_the_orders() -> None:
    """Forth and back, and reversed."""
    assert [after("s" * n).order for n in range(len(ORDERS) + 1)] == [*ORDERS, ORDERS[0]]
    assert after("S").order == ORDERS[-1]
    assert after("r").reverse


def test_a_filter_is_typed_kept_and_dropped() -> None:
    """Letters that are commands elsewhere belong to the text."""
    view = after("/shop q")
    assert (view.typing, view.wanted, view.ended) == ("shop q", "shop q", False)
    assert after("\x7f\x7f\r", view).filter == "shop"
    assert after("\x1b", view).filter == ""
    assert after("/db\r/").typing == "db"
    assert len(after("/" + "x" * 500).typing or "") == MAX_FILTER


def test_pause_help_threads_order_of_tables_and_end() -> None:
    """Each key switches, and switches back."""
    for key, name in (("p", "paused"), ("h", "help"), ("e", "threads"), ("c", "cpus_first")):
        assert getattr(after(key), name)
        assert not getattr(after(key * 2), name)
    assert after("q").ended
    assert after("\x03").ended
    assert after(" ").paused


def test_scrolling_stays_inside() -> None:
    """Never above the first row, never below the last page."""
    assert after("\x1b[B\x1b[Bj").top == 3
    assert after("\x1b[A").top == 0
    assert after("\x1b[6~").top == 10
    assert after("\x1b[F").bounded(25, 10).top == 15
    assert after("\x1b[F").bounded(5, 10).top == 0


@given(st.text(max_size=60))
def test_nothing_that_is_typed_fails(typed: str) -> None:
    """Whatever a terminal sends, the view can be shown."""
    view = after(typed).bounded(20, 10)
    assert view.order in ORDERS
    assert 0 <= view.top <= 10
    assert view.wanted.isprintable()


def test_rows_are_sorted_and_filtered() -> None:
    """The worst first; what is unknown last; names below a tenth of a difference."""
    found = docs.top()
    names = [one.pod for one in View().sandboxes(found)]
    assert names == ["shop/web", "shop/db", "other/late"]
    assert [one.pod for one in View(reverse=True).sandboxes(found)] == [
        "shop/db", "shop/web", "other/late",
    ]  # fmt: skip
    assert [one.pod for one in View(order="name").sandboxes(found)] == sorted(names)
    assert [one.pod for one in View(filter="SHOP").sandboxes(found)] == ["shop/web", "shop/db"]
    assert [one.cpu for one in View().pcpus(found)] == [4, 5, 12]
    assert [one.cpu for one in View(filter="late").pcpus(found)] == [12]
    swapped = replace(found, sandboxes=found.sandboxes[::-1])
    assert [one.pod for one in View().sandboxes(swapped)] == names


def test_the_help_names_every_key() -> None:
    """A key that is not in the help does not exist for the operator."""
    named = " ".join(f"{name} {text}" for name, text in KEYS)
    for key in ("q", "s", "S", "r", "/", "e", "c", "p", "Space", "Home", "End", "h", "?"):
        assert key in named
