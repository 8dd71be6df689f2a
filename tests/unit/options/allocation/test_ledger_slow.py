"""Containers that are slow: how long all of them are left alone."""

from __future__ import annotations

import pytest

from kata_pin.options.allocation.ledger import LONGEST_REST_S, NOTHING, REST, Ledger


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
def ledger(clock: Clock) -> Ledger:
    one = Ledger(clock)
    for name in ("a", "b", "gone", "hung", "web", "well", *map(str, range(50))):
        one.reported(name, NOTHING)
    return one


def test_who_is_fast_never_rests(ledger: Ledger) -> None:
    """Neither for its own sake nor for that of others."""
    ledger.took("hung", 5.0)
    ledger.took("web", 0.05)
    assert ledger.slow_until("web") == ledger.slow_until("new") == 0.0


def test_all_slow_ones_rest_together(ledger: Ledger, clock: Clock) -> None:
    """So many times as long as they took together."""
    for name in ("a", "b"):
        ledger.took(name, 5.0)
    assert ledger.slow_until("a") == ledger.slow_until("b") == clock.now + 2 * REST * 5.0


def test_it_grows_for_who_stays_slow(ledger: Ledger, clock: Clock) -> None:
    """Each time twice as long, up to the longest rest."""
    rests = []
    for _ in range(40):
        ledger.took("hung", 5.0)
        rests.append(ledger.slow_until("hung") - clock.now)
        clock.now = ledger.slow_until("hung")
    assert rests[:4] == [100.0, 200.0, 400.0, LONGEST_REST_S]
    assert rests[-1] == LONGEST_REST_S


def test_never_less_than_its_share(ledger: Ledger, clock: Clock) -> None:
    """One that takes very long rests longer than the longest rest."""
    ledger.took("hung", LONGEST_REST_S)
    assert ledger.slow_until("hung") == clock.now + REST * LONGEST_REST_S


@pytest.mark.parametrize("hung", [1, 6, 50])
def test_the_share_of_time(ledger: Ledger, clock: Clock, hung: int) -> None:
    """However many are slow for a day, and are tried whenever they may be: below a twentieth."""
    names = [str(one) for one in range(hung)]
    began, busy, turn = clock.now, 0.0, 0
    for name in names:  # each has one try
        clock.now += 5.0
        ledger.took(name, 5.0)
    while clock.now < began + 86_400:
        clock.now = max(clock.now, ledger.slow_until(names[turn % hung])) + 5.0
        busy += 5.0
        ledger.took(names[turn % hung], 5.0)
        turn += 1
    assert turn > 100
    assert busy / (clock.now - began) < 1 / REST


def test_a_mark_ends(ledger: Ledger) -> None:
    """With a fast try, or with the container."""
    for name in ("well", "gone", "hung"):
        ledger.took(name, 5.0)
    ledger.took("well", 0.01)
    ledger.ended("gone")
    assert [ledger.slow_until(name) > 0 for name in ("well", "gone", "hung")] == [
        *(False, False),
        True,
    ]


def test_a_mark_outlives_a_connection(ledger: Ledger) -> None:
    """A container that hangs is slow still when the runtime reports it again; others are new."""
    for name in ("hung", "gone"):
        ledger.took(name, 5.0)
    ledger.disconnected()
    for name in ("hung", "web"):
        ledger.reported(name, NOTHING)
    ledger.connected()
    assert ledger.slow_until("hung") > ledger.slow_until("web") == 0.0
    assert ledger.get("gone") is None
