"""A supervisor runs one pass at a time, never misses a mark, and survives a pass that fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

from kata_pin.daemon.reconcile.supervisor import (
    LONG_S,
    REST,
    RETRY_S,
    PassResult,
    Supervisor,
    Verdict,
)
from kata_pin.model.pass_outcome import Cause
from kata_pin.model.placement import Report

Outcome = Verdict | Exception


class Script:
    """A pass that gives the next scripted verdict; the last one is repeated."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.runs = 0
        self.during: Callable[[], object] | None = None

    async def __call__(self, sandbox_id: str) -> PassResult:
        self.runs += 1
        if self.during is not None:
            self.during()
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return PassResult(Report(sandbox_id=sandbox_id, rounds=self.runs), outcome)


@contextlib.asynccontextmanager
async def running(script: Script) -> AsyncIterator[Supervisor]:
    """Run a supervisor over a script."""
    supervisor = Supervisor("pod")
    task = asyncio.create_task(supervisor.run(script))
    try:
        yield supervisor
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _settled(supervisor: Supervisor, ticket: int) -> Report | None:
    async with asyncio.timeout(5):
        return await supervisor.settled(ticket)


async def test_many_marks_make_one_pass() -> None:
    """Marks that arrive together are answered by one pass."""
    script = Script(Verdict.SETTLED)
    async with running(script) as supervisor:
        tickets = [supervisor.mark(f"event {n}") for n in range(50)]
        reports = [await _settled(supervisor, ticket) for ticket in tickets]
    assert script.runs == 1
    assert all(report is not None for report in reports)


async def test_a_mark_during_a_pass_makes_another() -> None:
    """What changed while a pass looked is looked at again, and its waiter waits for that."""
    script = Script(Verdict.SETTLED)
    async with running(script) as supervisor:
        late: list[int] = []

        def during() -> None:
            script.during = None
            late.append(supervisor.mark("born during the pass"))

        script.during = during
        await _settled(supervisor, supervisor.mark("first"))
        report = await _settled(supervisor, late[0])
    assert report is not None
    assert report.rounds == 2


async def test_a_failing_pass_is_tried_again_and_hurts_nobody() -> None:
    """The barrier counts, retries, and the waiter hears that there is no report."""
    script = Script(RuntimeError("boom"), Verdict.SETTLED)
    async with running(script) as supervisor:
        assert await _settled(supervisor, supervisor.mark("x")) is None
        async with asyncio.timeout(5):
            while script.runs < 2:
                await asyncio.sleep(0.01)
        assert supervisor.failures == 1
        assert supervisor.report is not None


async def test_retries_end() -> None:
    """A sandbox that never gets its VMM is not looked for for ever."""
    assert 20 <= sum(RETRY_S) <= 60


@pytest.mark.parametrize("count", [1, 3])
async def test_the_end_wakes_every_waiter(count: int) -> None:
    """When the sandbox is gone the loop ends and nobody waits in vain."""
    script = Script(Verdict.GONE)
    supervisor = Supervisor("pod")
    task = asyncio.create_task(supervisor.run(script))
    ticket = supervisor.mark("x") + 1  # a pass that will never come
    waiters = [asyncio.create_task(_settled(supervisor, ticket)) for _ in range(count)]
    async with asyncio.timeout(5):
        await task
        await asyncio.gather(*waiters)


async def test_a_young_thread_is_looked_at_again() -> None:
    """While a thread is young passes follow by themselves, and end once it is settled."""
    script = Script(Verdict.YOUNG, Verdict.YOUNG, Verdict.YOUNG, Verdict.SETTLED)
    settled = asyncio.Event()
    script.during = lambda: settled.set() if script.runs == 4 else None
    async with running(script) as supervisor:
        supervisor.mark("thread born")
        async with asyncio.timeout(5):
            await settled.wait()
        assert await _settled(supervisor, 1) is not None
        await asyncio.sleep(0)
    assert script.runs == 4


async def test_a_long_pass_is_followed_by_a_rest() -> None:
    """A sandbox whose passes are long gets a fifth of the time at most."""
    ended: list[float] = []

    async def slow(sandbox_id: str) -> PassResult:
        ended.append(time.monotonic())
        return PassResult(Report(sandbox_id=sandbox_id), Verdict.SETTLED, worked_s=2 * LONG_S)

    supervisor = Supervisor("pod")
    task = asyncio.create_task(supervisor.run(slow))
    async with asyncio.timeout(30):
        while len(ended) < 3:
            supervisor.mark("thread born")
            await asyncio.sleep(0.001)
    assert ended[1] - ended[0] >= REST * 2 * LONG_S
    assert ended[2] - ended[1] >= REST * 2 * LONG_S
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_what_waits_for_a_pass_ends_the_rest() -> None:
    """A hook of the sandbox itself is answered at once, after however long a pass."""

    async def slow(sandbox_id: str) -> PassResult:
        return PassResult(Report(sandbox_id=sandbox_id), Verdict.SETTLED, worked_s=3600.0)

    supervisor = Supervisor("pod")
    task = asyncio.create_task(supervisor.run(slow))
    for reason in ("one", "two", "three"):
        assert await _settled(supervisor, supervisor.mark(reason)) is not None
    assert not supervisor.is_awaited()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_pass_knows_what_asked_for_it_and_when() -> None:
    """The cause is what was told since the last pass; one that is only repeated keeps its cause."""
    script = Script(Verdict.RETRY, Verdict.SETTLED)
    causes: list[tuple[str, ...]] = []
    async with running(script) as supervisor:
        script.during = lambda: causes.append(supervisor.cause.reasons)
        start = time.monotonic()
        supervisor.mark("hook")
        supervisor.mark("audit")
        await asyncio.sleep(0)
        supervisor.mark("hook")
        async with asyncio.timeout(5):
            while script.runs < 2:
                await asyncio.sleep(0.001)
        assert start <= supervisor.cause.since <= start + RETRY_S[0]
        await _settled(supervisor, supervisor.mark("thread born"))
    assert causes[-1] == ("thread born",)
    assert set(causes[0]) == {"hook", "audit"}
    assert len(causes) >= 3


async def test_whether_somebody_waits_is_known() -> None:
    """From the wait for a ticket to its end, also where the one who waits gives up."""
    script = Script(Verdict.SETTLED)
    supervisor = Supervisor("pod")
    ticket = supervisor.mark("hook")
    assert not supervisor.is_awaited()
    waiting = asyncio.create_task(supervisor.settled(ticket))
    given_up = asyncio.create_task(supervisor.settled(ticket))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert supervisor.is_awaited()
    running_ = asyncio.create_task(supervisor.run(script))
    async with asyncio.timeout(5):
        await waiting
    assert not supervisor.is_awaited()
    running_.cancel()
    await asyncio.gather(running_, return_exceptions=True)


async def test_a_repeated_pass_keeps_its_cause() -> None:
    """Nothing else has asked for it: its pins are what was asked for the first time."""
    script = Script(Verdict.RETRY, Verdict.RETRY, Verdict.SETTLED)
    causes: list[Cause] = []
    async with running(script) as supervisor:
        script.during = lambda: causes.append(supervisor.cause)
        supervisor.mark("hook")
        async with asyncio.timeout(5):
            while script.runs < 3:
                await asyncio.sleep(0.005)
    assert {cause.reasons for cause in causes} == {("hook",)}
    assert len({cause.since for cause in causes}) == 1
