"""Pods that come and go: of those that are over the daemon keeps nothing in memory."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter, deque
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from pathlib import Path

from msgspec import Struct

from tests.boundary.node import Node

PODS = 16
TABLES = (dict, set, list, deque)


async def test_pods_that_are_over_leave_nothing_in_memory(tmp_path: Path) -> None:
    """After 3 N pods no table of the daemon has more entries than after N, but for N / 4."""
    history = {"rows": 8, "sandbox_rows": 2}
    async with Node(tmp_path, audit={"affinity_s": 10, "deep_s": 60}, history=history) as node:
        await _churn(node, 0, PODS)
        before = Counter(dict(_tables()))
        await _churn(node, PODS, 3 * PODS)
        grown = Counter(dict(_tables())) - before
        assert len(before) > 100
    assert {table: more for table, more in grown.items() if more > PODS // 4} == {}


async def _churn(node: Node, first: int, end: int) -> None:
    """Have pods come and go one after the other, with an audit now and then and at the end."""
    for number in range(first, end):
        vm, container = node.vm(f"p{number}"), f"c{number}"
        await node.create(vm, vm.id)
        await node.create(vm, container, "4-5", exclusive=True)
        await node.stopped(vm, container)
        await node.stopped(vm, vm.id)
        vm.end()
        if number % 8 == 0:
            await node.clock.move(61)
    for _ in range(3):
        await node.clock.move(61)
        await asyncio.sleep(0.3)


def _tables() -> Iterator[tuple[str, int]]:
    """Yield the sizes of all tables in the product's objects and modules, the largest of a name."""
    gc.collect()
    sizes: Counter[str] = Counter()
    for thing in gc.get_objects():
        if str(type(thing).__module__).startswith("kata_pin."):
            for name, value in _attributes(thing):
                if isinstance(value, TABLES):
                    table = f"{type(thing).__qualname__}.{name}"
                    sizes[table] = max(sizes[table], len(value))
    for module in [name for name in sys.modules if name.startswith("kata_pin.")]:
        for name, value in vars(sys.modules[module]).items():
            if isinstance(value, TABLES):
                sizes[f"{module}.{name}"] = len(value)
            elif isinstance(value, _lru_cache_wrapper):
                sizes[f"{module}.{name}"] = value.cache_info().currsize
    yield from sizes.items()


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    names = [*getattr(thing, "__dict__", ())]
    names += thing.__struct_fields__ if isinstance(thing, Struct) else ()
    for name in names:
        yield name, getattr(thing, name, None)
