"""What is lost at the end of a window is never silent."""

from __future__ import annotations

from typing import cast

from kata_pin.linux.perf import Ring
from kata_pin.linux.switches import _problem, _Recorded


class Reads:
    """A ring of which nothing is read, full or not each time."""

    def __init__(self, *full: bool) -> None:
        self._full = iter(full)
        self.full = False

    def read(self) -> bytes:
        """Return nothing."""
        self.full = next(self._full)
        return b""


def test_a_ring_that_was_full_is_a_problem_until_the_kernel_writes_again() -> None:
    """It tells of lost records with the next one only; an empty ring after that proves nothing."""
    recorded = _Recorded(cast("Ring", Reads(False, True, False)))
    problems = []
    for _ in range(3):
        recorded.events()
        problems.append(_problem(recorded, is_online=True))
    assert problems == ["", "records were lost at its end", "records were lost at its end"]
