"""What a round of a pass leaves."""

from __future__ import annotations

import pytest

from kata_pin.base.placement import Action, ActionResult
from kata_pin.base.values import Outcome
from kata_pin.engine.rounds import after_actions
from tests.support import world


@pytest.mark.parametrize(
    ("outcome", "after", "left"),
    [
        (Outcome.DONE, "1", ["1"]),
        (Outcome.REFUSED, "", ["0"]),
        (Outcome.GONE, "", []),  # an audit would look for it in vain
    ],
)
def test_threads_after_a_round(outcome: Outcome, after: str, left: list[str]) -> None:
    """With the affinity that was read back; one that exited is not among them."""
    thread = world.vcpu(0, on="0")
    action = Action(thread.key, world.cpus("1"), world.cpus("0"), "")
    done = ActionResult(action, outcome, world.cpus(after) if after else None)
    assert [str(one.task.affinity) for one in after_actions([thread], [done])] == left
