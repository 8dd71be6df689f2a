"""Containers that are slow: how long all of them are left alone."""

from __future__ import annotations

import pytest

from kata_pin.daemon.allocation.slowness import LONGEST_S, REST, Slowness


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slow(clock: Clock) -> Slowness:
    return Slowness(clock)


def test_who_is_fast_never_rests(slow: Slowness) -> None:
    """Neither for its own sake nor for that of others."""
    slow.took("hung", 5.0)
    slow.took("web", 0.05)
    assert slow.until("web") == slow.until("new") == 0.0
    assert "web" not in slow


def test_all_slow_ones_rest_together(slow: Slowness, clock: Clock) -> None:
    """So many times as long as they took together."""
    for name in ("a", "b"):
        slow.took(name, 5.0)
    assert slow.until("a") == slow.until("b") == clock.now + 2 * REST * 5.0


def test_it_grows_for_who_stays_slow(slow: Slowness, clock: Clock) -> None:
    """Each time twice as long, up to the longest rest."""
    rests = []
    for _ in range(40):
        slow.took("hung", 5.0)
        rests.append(slow.until("hung") - clock.now)
        clock.now = slow.until("hung")
    assert rests[:4] == [100.0, 200.0, 400.0, LONGEST_S]
    assert rests[-1] == LONGEST_S


def test_never_less_than_its_share(slow: Slowness, clock: Clock) -> None:
    """One that takes very long rests longer than the longest rest."""
    slow.took("hung", LONGEST_S)
    assert slow.until("hung") == clock.now + REST * LONGEST_S


@pytest.mark.parametrize("hung", [1, 6, 50])
def test_the_share_of_time(slow: Slowness, clock: Clock, hung: int) -> None:
    """However many are slow for a day, and are tried whenever they may be: below a twentieth."""
    names = [str(one) for one in range(hung)]
    began, busy, turn = clock.now, 0.0, 0
    for name in names:  # each has one try
        clock.now += 5.0
        slow.took(name, 5.0)
    while clock.now < began + 86_400:
        clock.now = max(clock.now, slow.until(names[turn % hung])) + 5.0
        busy += 5.0
        slow.took(names[turn % hung], 5.0)
        turn += 1
    assert turn > 100
    assert busy / (clock.now - began) < 1 / REST


def test_a_mark_ends(slow: Slowness) -> None:
    """With a fast try, or with the container."""
    for name in ("well", "gone", "hung"):
        slow.took(name, 5.0)
    slow.took("well", 0.01)
    slow.keep(lambda name: name != "gone")
    assert [name in slow for name in ("well", "gone", "hung")] == [False, False, True]
