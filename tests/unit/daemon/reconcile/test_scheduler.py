"""Passes take turns: one at a time, awaited ones first, and nobody is forgotten."""

from __future__ import annotations

import asyncio
import contextlib

from kata_pin.daemon.reconcile.scheduler import MOST_PASSED_OVER, PassScheduler


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
