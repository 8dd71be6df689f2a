"""Work in steps: a generator that yields where others may run, and returns the result.

A pass over a VMM with thousands of threads takes a second. Its loops yield every STEP threads; the
daemon lets the event loop run then (engine/counters.py), a command just goes on (`finish`).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]

STEP: Final = 64
"""Threads between two yields: about 1 ms."""


def finish(steps: Steps[T]) -> T:
    """Run all steps at once; return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
