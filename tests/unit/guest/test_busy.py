"""Who was busy while who ran: answers with clear margins, or none."""

from __future__ import annotations

import pytest

from kata_pin.base.threads import ThreadKey
from kata_pin.guest.map import Votes, by_rank, match


def key(tid: int) -> ThreadKey:
    """Return a thread's identity."""
    return ThreadKey(1000, tid, 5)


def matched(ran: dict[int, float], busy: dict[int, float]) -> dict[int, int]:
    """Return guest CPU by tid."""
    return {k.tid: c for k, c in match({key(t): s for t, s in ran.items()}, busy).items()}


@pytest.mark.parametrize(
    ("ran", "busy", "expected"),
    [
        pytest.param({1: 0.01, 2: 2.0}, {0: 0.01, 3: 2.02}, {2: 3}, id="one is busy"),
        pytest.param(
            {1: 0.5, 2: 2.0, 3: 4.0}, {0: 4.1, 1: 0.51, 7: 1.95}, {1: 1, 2: 7, 3: 0}, id="all apart"
        ),
        pytest.param({1: 2.0, 2: 2.05}, {0: 2.0, 1: 2.05}, {}, id="two threads alike"),
        pytest.param({1: 2.0, 2: 0.0}, {0: 2.0, 1: 2.1}, {}, id="two guest CPUs alike"),
        pytest.param({1: 0.1}, {0: 0.1}, {}, id="too little"),
        pytest.param({1: 2.0}, {0: 0.3}, {}, id="a guest that polls while idle"),
        pytest.param({1: 1.0}, {0: 2.0}, {}, id="stolen time counted as busy"),
        pytest.param({1: 2.0}, {}, {}, id="no guest"),
        pytest.param({}, {0: 2.0}, {}, id="no threads"),
        pytest.param({1: 2.0, 2: 2.3}, {0: 2.0}, {}, id="apart, but not clearly"),
    ],
)
def test_match(ran: dict[int, float], busy: dict[int, float], expected: dict[int, int]) -> None:
    """Each case by its name."""
    assert matched(ran, busy) == expected


def test_one_interval_is_no_proof() -> None:
    """Two must agree."""
    votes = Votes()
    votes.add({key(1): 3})
    assert votes.measured == {}
    votes.add({key(1): 3})
    assert {k.tid: m.guest_cpu for k, m in votes.measured.items()} == {1: 3}


def test_a_contradiction_is_not_forgotten() -> None:
    """A thread with contradicting answers has none any more while it lives."""
    votes = Votes()
    for cpu in (3, 4, 4, 4):
        votes.add({key(1): cpu})
    assert votes.measured == {}
    votes.keep_only([])
    for _ in range(2):
        votes.add({key(1): 5})
    assert [m.guest_cpu for m in votes.measured.values()] == [5]


def keys(numbers: dict[int, int]) -> dict[ThreadKey, int]:
    """Return numbers by thread instead of tid."""
    return {key(tid): number for tid, number in numbers.items()}


BY_APIC = keys({0: 0, 13: 13, 14: 14, 15: 15})
AS_THEY_CAME = keys({0: 0, 15: 1, 14: 2, 13: 3})


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param({15: 3}, {15: 15}, id="the last by number: by APIC id"),
        pytest.param({15: 1}, {15: 1}, id="the first hotplugged: as they came"),
        pytest.param({14: 2}, {}, id="the one in the middle tells nothing"),
        pytest.param({0: 0}, {0: 0}, id="a boot vCPU has one number anyway"),
        pytest.param({15: 3, 13: 3}, {}, id="no numbering gives this"),
        pytest.param({15: 1, 13: 3}, {15: 1, 13: 3}, id="two that agree"),
        pytest.param({7: 0}, {}, id="a thread that no numbering has"),
    ],
)
def test_rank_tells_the_numberings_apart(ranks: dict[int, int], expected: dict[int, int]) -> None:
    """A rank among the online CPUs is no number, but it refutes one of two numberings."""
    assert by_rank(keys(ranks), [BY_APIC, AS_THEY_CAME]) == keys(expected)


def test_rank_without_numberings() -> None:
    """Where the number of vCPUs at start is unknown, a rank gives no answer."""
    assert by_rank(keys({15: 3}), []) == {}
