"""Which passes are waited for, and when a sandbox counts as having left CPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kata_pin.base.placement import RELEASED, Cause, PassOutcome, Report
from kata_pin.base.values import ChangeState
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.options.allocation.grants import PendingPasses


class Passes:
    """Sandboxes whose passes are only asked for."""

    ids = ("a", "b")

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.awaited: list[tuple[str, int]] = []
        self.newer = 0

    def mark(self, sandbox_id: str, _reason: str, *, event: bool = True) -> int:
        del event
        self.asked.append(sandbox_id)
        return len(self.asked)

    def began(self, _sandbox_id: str) -> int:
        """All passes began after everything that was asked for, unless a test says otherwise."""
        return len(self.asked) - self.newer

    async def wait_for_pass(self, sandbox_id: str, ticket: int) -> None:
        self.awaited.append((sandbox_id, ticket))


@pytest.fixture
def passes() -> Passes:
    return Passes()


@pytest.fixture
def pending(passes: Passes) -> PendingPasses:
    return PendingPasses(cast("Sandboxes", passes))


def passed(state: ChangeState, *, settled: bool = True) -> PassOutcome:
    """Return a pass over sandbox `a`."""
    report = SimpleNamespace(all_placed=settled)
    return PassOutcome("a", "shop/a", state, cast("Report", report), Cause())


async def test_every_pass_that_was_asked_for_is_awaited(
    pending: PendingPasses, passes: Passes
) -> None:
    """But those that ended, and those of sandboxes that are over or unknown."""
    assert pending.request(["a", "b", "c"], "test") == {"c"}
    assert sorted(passes.asked) == ["a", "b"]
    pending.ended("a")
    await pending.all_ended()
    assert [sandbox for sandbox, _ in passes.awaited] == ["b"]
    pending.ended("b")
    await pending.all_ended()
    assert len(passes.awaited) == 1


@pytest.mark.parametrize("state", ["ok", "drift", RELEASED])
def test_a_pass_that_moved_everything(pending: PendingPasses, state: ChangeState) -> None:
    """The threads are where they should be, or an operator wants them anywhere."""
    assert pending.passed(passed(state))
    assert pending.passed(passed(state, settled=False)) is (state == RELEASED)


def test_a_pass_that_began_before_the_decision_moved_nobody(
    pending: PendingPasses, passes: Passes
) -> None:
    """A decision that came while the pass ran is followed by the next one, however it went."""
    pending.request({"a"}, "another decision")
    passes.newer = 1
    assert not pending.passed(passed("ok"))
    passes.newer = 0
    assert pending.passed(passed("ok"))
