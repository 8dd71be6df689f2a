"""The administrator's overrides: the CPU class of single pods, one line each.

    # pod                 class
    shop/database         exclusive
    0c7a4d2be81f          share

A pod is named by `namespace/name`, or by the full id of its sandbox outside Kubernetes. The classes
are those of CpuClass. One wrong line makes the whole file unusable, because half of the overrides
is not what the administrator meant. Out of scope: the file itself (sources/orders.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.settings import CpuClass
from kata_pin.wire.ids import is_id, is_name

MAX_BYTES: Final = 1 << 20
MAX_ORDERS: Final = 4096  # most pods that can be named; no node has more

_HEAD: Final = (
    "# Written by `kata-pin policy set`; one line per pod: namespace/name or sandbox id, class.\n"
)


def parse_orders(data: bytes) -> dict[str, CpuClass]:
    """Return the class of each named pod; ParseError names the wrong line."""
    if len(data) > MAX_BYTES:
        raise ParseError(f"larger than {MAX_BYTES} bytes", source="orders")
    try:
        lines = data.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise ParseError("not ASCII", source=f"orders: byte {error.start}") from error
    orders: dict[str, CpuClass] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        pod, cpu_class = _order(words, f"orders: line {number}")
        if pod in orders:
            raise ParseError(
                "second line for the same pod", source=f"orders: line {number}", text=pod
            )
        if len(orders) == MAX_ORDERS:
            raise ParseError(f"more than {MAX_ORDERS} lines", source="orders")
        orders[pod] = cpu_class
    return orders


def render_orders(orders: Mapping[str, CpuClass]) -> bytes:
    """Return the file's content, sorted by pod."""
    width = max((len(pod) for pod in orders), default=0)
    lines = (f"{pod:<{width}}  {orders[pod].value}\n" for pod in sorted(orders))
    return (_HEAD + "".join(lines)).encode("ascii")


def is_pod(text: str) -> bool:
    """Return whether `text` can name a pod: `namespace/name`, or a sandbox id."""
    namespace, slash, name = text.partition("/")
    return is_name(namespace) and is_name(name) if slash else is_id(text)


def _order(words: list[str], source: str) -> tuple[str, CpuClass]:
    if len(words) != 2:
        raise ParseError("expected a pod and a class", source=source, text=" ".join(words))
    pod, word = words
    if not is_pod(pod):
        raise ParseError("neither namespace/name nor a sandbox id", source=source, text=pod)
    try:
        return pod, CpuClass(word)
    except ValueError:
        offered = ", ".join(CpuClass)
        raise ParseError(f"expected one of {offered}", source=source, text=word) from None
