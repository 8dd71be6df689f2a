"""Waiting for a condition with a deadline: the only way tests here pass time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, TypeVar

SCALE: Final = float(os.environ.get("KATA_PIN_WAIT_SCALE", "1"))
"""Every deadline of tests/support is multiplied by this: `scripts/lab` knows its machine's pace."""

T = TypeVar("T")


def wait_for(probe: Callable[[], T | None], what: str, timeout_s: float = 10.0) -> T:
    """Return the first true value of `probe`; TimeoutError naming `what` after the deadline."""
    deadline = time.monotonic() + timeout_s * SCALE
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s * SCALE:g} s")
        time.sleep(0.002 * SCALE)
