"""A thread that keeps coming back is another writer's, for a while that grows."""

from __future__ import annotations

from kata_pin.daemon.reconcile.other_writers import (
    FIRST_TRUCE_S,
    LONGEST_TRUCE_S,
    WINDOW_S,
    ForeignWatch,
    OtherWriter,
)
from kata_pin.model.thread import ThreadKey

ONE, TWO = ThreadKey(1, 2, 3), ThreadKey(1, 3, 3)


def test_three_returns_within_the_window_make_a_truce() -> None:
    """Two returns are drift; the third says another writer, and only for that thread."""
    watch = ForeignWatch()
    watch.drifted([ONE, TWO], 0)
    watch.drifted([ONE], 10)
    assert not watch.left_alone(10)
    watch.drifted([ONE], 20)
    assert watch.left_alone(20) == {ONE}
    assert watch.left_alone(20 + FIRST_TRUCE_S) == frozenset()


def test_slow_drift_never_counts_as_foreign() -> None:
    """Returns farther apart than the window do not add up."""
    watch = ForeignWatch()
    for n in range(20):
        watch.drifted([ONE], n * (WINDOW_S / 2 + 1))
    assert not watch.left_alone(20 * WINDOW_S)


def test_truces_grow_and_are_bounded() -> None:
    """Each time the other writer wins it is left alone for twice as long, up to a bound."""
    watch, now, lengths = ForeignWatch(), 0.0, []
    for _ in range(8):
        for _ in range(3):
            now += 1
            watch.drifted([ONE], now)
        start = now
        while ONE in watch.left_alone(now):
            now += 1
        lengths.append(now - start)
    assert lengths[:2] == [FIRST_TRUCE_S, 2 * FIRST_TRUCE_S]
    assert max(lengths) == LONGEST_TRUCE_S


def test_an_event_ends_the_truce_and_gone_threads_are_dropped() -> None:
    """After an event the placement is asserted again; dead threads take no memory."""
    watch = ForeignWatch()
    for now in (1, 2, 3):
        watch.drifted([ONE, TWO], now)
    watch.keep_only([TWO])
    assert watch.left_alone(4) == {TWO}
    watch.forget()
    assert not watch.left_alone(4)


def test_another_writer_is_told_with_all_it_did() -> None:
    """Ordinary drift names nobody; who moved a thread three times stays known, truce or not."""
    watch = ForeignWatch()
    watch.drifted([ONE, TWO], 100)
    watch.drifted([ONE], 110)
    assert watch.writer() is None
    watch.drifted([ONE], 120)
    watch.drifted([ONE], 121)
    watch.forget()
    assert watch.writer() == OtherWriter(4, 100, frozenset({ONE}))
    watch.keep_only([TWO])
    assert watch.writer() is None
