"""move_pages(2) as the double makes it, and as this kernel does, as far as one NUMA node shows."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOENT, ENOSYS

import pytest

from kata_pin.rights.broker.pages import Call, _move_pages
from tests.support.numa_vmm import SMALL, NumaVmm

PAGES = 4
ABSENT = 2
"""A page that nobody has touched."""

Mapped = tuple[Call, list[int]]


@contextmanager
def double() -> Iterator[Mapped]:
    vmm = NumaVmm(PAGES, 0)
    del vmm.nodes[vmm.address(ABSENT)]
    yield vmm.call, [vmm.address(number) for number in range(PAGES)]


@contextmanager
def kernel() -> Iterator[Mapped]:
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for number in set(range(PAGES)) - {ABSENT}:
            memory[number * mmap.PAGESIZE] = 1
        first = ctypes.c_char.from_buffer(memory)
        base = ctypes.addressof(first)
        del first
        yield _move_pages, [base + number * mmap.PAGESIZE for number in range(PAGES)]


@pytest.fixture(params=[double, kernel])
def mapped(request: pytest.FixtureRequest) -> Iterator[Mapped]:
    if request.param is kernel:
        if mmap.PAGESIZE != SMALL:
            pytest.skip("pages of another size")
        try:
            _move_pages(0, [], 0, 0)
        except OSError as error:
            if error.errno != ENOSYS:
                raise
            pytest.skip("the kernel has no move_pages")
    with request.param() as one:
        yield one


def _wanted(present: int) -> list[int]:
    return [-ENOENT if number == ABSENT else present for number in range(PAGES)]


def test_where_pages_are(mapped: Mapped) -> None:
    """The node of each page, and ENOENT of one that is not there."""
    call, addresses = mapped
    assert call(os.getpid(), addresses, None, 0) == _wanted(0)


def test_pages_that_are_there_already(mapped: Mapped) -> None:
    """Moving them succeeds; the page that is not there is refused alone."""
    call, addresses = mapped
    assert call(os.getpid(), addresses, 0, 1 << 1) == _wanted(0)
