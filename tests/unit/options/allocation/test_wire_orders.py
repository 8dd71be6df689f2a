"""The administrator's orders: what is read, what is refused, and that writing reads back."""

from __future__ import annotations

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.base.values import CpuClass
from kata_pin.options.allocation import orders
from kata_pin.options.allocation.orders import parse_orders


def test_what_an_administrator_writes() -> None:
    """Comments, blank lines and any white space between the two words."""
    text = b"# mine\n\nshop/web   share  # for the night\n  0c7a4d\texclusive\nshop/db none"
    assert parse_orders(text) == {
        "shop/web": CpuClass.SHARE,
        "0c7a4d": CpuClass.EXCLUSIVE,
        "shop/db": CpuClass.NONE,
    }
    assert parse_orders(b"") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"shop/web", "line 1: expected a pod and a class"),
        (b"\nshop/web share now", "line 2: expected a pod and a class"),
        (b"shop/web shared", "line 1: expected one of none, share, exclusive: 'shared'"),
        (b"shop/web Share", "expected one of"),
        (b"a/b/c share", "neither namespace/name nor a sandbox id"),
        (b"../etc share", "neither namespace/name nor a sandbox id"),
        (b"/web share", "neither namespace/name nor a sandbox id"),
        (b"shop/web share\nshop/web none", "line 2: second line for the same pod"),
        ("shöp/web share".encode(), "byte 2: not ASCII"),
        (b"x" * (orders.MAX_BYTES + 1), "larger than"),
        (b"".join(b"p%d none\n" % n for n in range(orders.MAX_ORDERS + 1)), "more than 4096"),
    ],
)
def test_half_an_order_is_none(text: bytes, said: str) -> None:
    """One wrong line makes the file unusable, and the error names it."""
    with pytest.raises(ParseError, match=said):
        parse_orders(text)
