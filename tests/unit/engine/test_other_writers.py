"""A thread that keeps coming back is another writer's, for a while that grows."""

from __future__ import annotations

from kata_pin.base.documents.state import Writer
from kata_pin.base.threads import ThreadKey
from kata_pin.engine.sandbox_cache import (
    FIRST_BACK_OFF_S,
    LONGEST_BACK_OFF_S,
    WINDOW_S,
    OtherWriters,
)

ONE, TWO = ThreadKey(1, 2, 3), ThreadKey(1, 3, 3)


def test_three_returns_within_the_window_make_it_back_off() -> None:
    """Two returns are drift; the third says another writer, and only for that thread."""
    watch = OtherWriters()
    watch.drifted([ONE, TWO], 0)
    watch.drifted([ONE], 10)
    assert not watch.backed_off(10)
    watch.drifted([ONE], 20)
    assert watch.backed_off(20) == {ONE}
    assert watch.backed_off(20 + FIRST_BACK_OFF_S) == frozenset()


def test_slow_drift_is_no_other_writer() -> None:
    """Returns farther apart than the window do not add up."""
    watch = OtherWriters()
    for n in range(20):
        watch.drifted([ONE], n * (WINDOW_S / 2 + 1))
    assert not watch.backed_off(20 * WINDOW_S)


def test_back_offs_grow_and_are_bounded() -> None:
    """Each time the other writer wins it is left alone for twice as long, up to a bound."""
    watch, now, lengths = OtherWriters(), 0.0, []
    for _ in range(8):
        for _ in range(3):
            now += 1
            watch.drifted([ONE], now)
        start = now
        while ONE in watch.backed_off(now):
            now += 1
        lengths.append(now - start)
    assert lengths[:2] == [FIRST_BACK_OFF_S, 2 * FIRST_BACK_OFF_S]
    assert max(lengths) == LONGEST_BACK_OFF_S


def test_an_event_ends_the_back_off_and_gone_threads_are_dropped() -> None:
    """After an event the placement is asserted again; dead threads take no memory."""
    watch = OtherWriters()
    for now in (1, 2, 3):
        watch.drifted([ONE, TWO], now)
    watch.keep_only([TWO])
    assert watch.backed_off(4) == {TWO}
    watch.forget()
    assert not watch.backed_off(4)


def test_another_writer_is_told_with_all_it_did() -> None:
    """Ordinary drift names nobody; three moves of a thread name a writer for good."""
    watch = OtherWriters()
    watch.drifted([ONE, TWO], 100)
    watch.drifted([ONE], 110)
    assert watch.writer(130) is None
    watch.drifted([ONE], 120)
    watch.drifted([ONE], 121)
    watch.forget()
    assert watch.writer(130) == Writer("other", False, "drift that returns", 4, 30, (ONE.tid,), 9)
    watch.keep_only([TWO])
    assert watch.writer(130) is None


def test_drift_during_a_back_off_does_not_prolong_it() -> None:
    """The thread is left to its other writer: what that one does meanwhile starts no new count."""
    watch = OtherWriters()
    for now in (1, 2, 3, 10, 11, 12):
        watch.drifted([ONE], now)
    assert watch.retry_at() == 3 + FIRST_BACK_OFF_S
    after = 4 + FIRST_BACK_OFF_S
    watch.drifted([ONE], after)
    watch.drifted([ONE], after + 1)
    assert not watch.backed_off(after + 1), "two returns since, and none counted from before"
