"""Passes take turns: one at a time, awaited ones first, and nobody is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from kata_pin.base.steps import Steps
from kata_pin.engine.counters import SLICE_S
from kata_pin.engine.runner import MOST_PASSED_OVER, PassScheduler


class Passes:
    """Passes that take turns, and the order in which they ran."""

    def __init__(self, *awaited: str) -> None:
        self.awaited = set(awaited)
        self.scheduler = PassScheduler(self.awaited.__contains__)
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._running = 0

    async def _run(self, name: str) -> None:
        async with self.scheduler.turn(name):
            self._running += 1
            assert self._running == 1
            await asyncio.sleep(0)
            self.order.append(name)
            self._running -= 1

    async def start(self, *names: str) -> None:
        """Have these ask for a turn, in this order."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._run(name))
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Wait for all of them."""
        async with asyncio.timeout(5):
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def test_turns_come_in_order() -> None:
    """Nobody is awaited: first come, first served."""
    passes = Passes()
    async with passes.scheduler.turn("holder"):
        await passes.start("a", "b", "c")
        assert passes.order == []
    await passes.end()
    assert passes.order == ["a", "b", "c"]


async def test_who_is_awaited_goes_first() -> None:
    """Also one that came last; among them the first come is served first."""
    passes = Passes("x", "y")
    async with passes.scheduler.turn("holder"):
        await passes.start("a", "b", "x", "c", "y")
    await passes.end()
    assert passes.order == ["x", "y", "a", "b", "c"]


async def test_nobody_is_passed_over_for_ever() -> None:
    """After so many others it is the turn of who has waited longest."""
    many = [f"x{number}" for number in range(3 * MOST_PASSED_OVER)]
    passes = Passes(*many)
    async with passes.scheduler.turn("holder"):
        await passes.start("a", "b", *many)
    await passes.end()
    assert passes.order.index("a") == MOST_PASSED_OVER
    assert passes.order.index("b") == 2 * MOST_PASSED_OVER + 1


async def test_who_gives_up_leaves_no_gap() -> None:
    """One cancelled while it waits, or in the moment of its turn, hands it on."""
    passes = Passes()
    async with passes.scheduler.turn("holder"):
        await passes.start("a", "b", "c")
        passes.tasks["b"].cancel()
    passes.tasks["a"].cancel()  # it was given the turn just now, and has not run yet
    await passes.end()
    assert passes.order == ["c"]
    await passes.start("d")
    await passes.end()
    assert passes.order == ["c", "d"]


async def test_a_pass_that_fails_hands_its_turn_on() -> None:
    """The next one has it."""
    passes = Passes()
    with contextlib.suppress(ValueError):
        async with passes.scheduler.turn("bad"):
            raise ValueError
    await passes.start("a")
    await passes.end()
    assert passes.order == ["a"]


async def test_a_stop_ends_everybody() -> None:
    """All cancelled at once, the holder first: each ends cancelled, none by another's turn."""
    passes = Passes()
    release = asyncio.Event()

    async def hold() -> None:
        async with passes.scheduler.turn("holder"):
            await release.wait()

    holder = asyncio.create_task(hold())
    await asyncio.sleep(0)
    await passes.start("a", "b", "c")
    tasks = [holder, *passes.tasks.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks] == [True] * 4
    await passes.start("d")
    await passes.end()
    assert passes.order == ["d"]


def _long(passes: Passes, name: str, slices: int) -> Steps[None]:
    for number in range(slices):
        passes.order.append(f"{name}{number}")
        time.sleep(SLICE_S * 1.1)
        yield
    passes.order.append(f"{name}ended")


async def test_a_long_pass_lets_others_pass() -> None:
    """What waits gets its turn after a slice; then the long pass goes on."""
    passes = Passes("x")

    async def long() -> None:
        async with passes.scheduler.turn("long") as turn:
            await turn.run(_long(passes, "slice ", 3))
            assert turn.worked_s >= 2 * SLICE_S

    async with passes.scheduler.turn("holder"):
        passes.tasks["long"] = asyncio.create_task(long())
        await asyncio.sleep(0)
        await passes.start("a", "b", "x")
    await passes.end()
    assert passes.order == ["x", "slice 0", "a", "b", "slice 1", "slice 2", "slice ended"]


async def test_two_passes_over_one_sandbox_never_overlap() -> None:
    """A release waits for the end of a pass that has paused."""
    passes = Passes()

    async def long(name: str) -> None:
        async with passes.scheduler.turn("one") as turn:
            await turn.run(_long(passes, name, 2))

    async with passes.scheduler.turn("holder"):
        for name in ("pass", "release"):
            passes.tasks[name] = asyncio.create_task(long(f"{name} "))
            await asyncio.sleep(0)
        await passes.start("other")
    await passes.end()
    assert [one for one in passes.order if one != "other"] == [
        *("pass 0", "pass 1", "pass ended"),
        *("release 0", "release 1", "release ended"),
    ]
    assert passes.order.index("other") < passes.order.index("pass ended")


@pytest.mark.parametrize("after", range(6))
async def test_a_pass_that_is_cancelled_while_it_pauses_blocks_nobody(after: int) -> None:
    """Whether or not it had its turn back."""
    passes = Passes()

    async def long() -> None:
        async with passes.scheduler.turn("long") as turn:
            await turn.run(_long(passes, "slice ", 100))

    task = asyncio.create_task(long())
    await asyncio.sleep(0)
    await passes.start("a", "b")
    for _ in range(after):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await passes.end()
    await passes.start("c", "long")
    await passes.end()
    assert {"a", "b", "c", "long"} <= set(passes.order)
