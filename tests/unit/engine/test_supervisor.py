"""A supervisor runs one pass at a time, never misses a mark, and survives a pass that fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kata_pin.base.placement import Cause, Report
from kata_pin.engine import sandboxes
from kata_pin.engine.sandboxes import (
    BORN,
    LONG_S,
    REST,
    RETRY_S,
    PassResult,
    PassVerdict,
    Supervisor,
)

Outcome = PassVerdict | Exception


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
async def running(passes: Callable[[str], Awaitable[PassResult]]) -> AsyncIterator[Supervisor]:
    """Run a supervisor over these passes."""
    supervisor = Supervisor("pod")
    task = asyncio.create_task(supervisor.run(passes))
    try:
        yield supervisor
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _settled(supervisor: Supervisor, ticket: int) -> Report | None:
    async with asyncio.timeout(5):
        return await supervisor.wait_for_pass(ticket)


async def test_many_marks_make_one_pass() -> None:
    """Marks that arrive together are answered by one pass."""
    script = Script(PassVerdict.SETTLED)
    async with running(script) as supervisor:
        tickets = [supervisor.mark(f"event {n}") for n in range(50)]
        reports = [await _settled(supervisor, ticket) for ticket in tickets]
    assert script.runs == 1
    assert all(report is not None for report in reports)


async def test_a_pass_has_to_see_what_was_heard_of_last() -> None:
    """A hook's reason is as old as its message; a pass that nothing new asked for sees all of now.

    A mark that comes before the pass reads the records counts too.
    """
    seen: list[float] = []
    begun = asyncio.Queue[float]()

    async def pass_(sandbox_id: str) -> PassResult:
        if len(seen) == 1:
            supervisor.mark("another")
            supervisor.saw_all_marks()
        seen.append(supervisor.as_of)
        begun.put_nowait(time.monotonic())
        verdict = PassVerdict.RETRY if len(seen) == 3 else PassVerdict.SETTLED
        return PassResult(Report(sandbox_id=sandbox_id), verdict)

    async with asyncio.timeout(5), running(pass_) as supervisor:
        await _settled(supervisor, supervisor.mark("hook", since=5.0))
        before = time.monotonic()
        await _settled(supervisor, supervisor.mark("hook", since=6.0))
        begins = [await begun.get() for _ in range(4)]
    assert seen[0] == 5.0
    assert before <= seen[1] <= begins[1]
    assert seen[2] <= seen[3] <= begins[3]
    assert seen[3] - seen[2] >= RETRY_S[0] / 2


async def test_who_marks_during_a_pass_waits_for_the_next_one() -> None:
    """What changed while a pass looked is looked at again; the end of that pass wakes nobody else.

    Each pass ends only when it is let go, so that a waiter of the second cannot be late for it.
    """
    begun, gates = asyncio.Queue[int](), [asyncio.Event(), asyncio.Event()]

    async def pass_(sandbox_id: str) -> PassResult:
        number = begun_before[0]
        begun_before[0] += 1
        begun.put_nowait(number)
        await gates[number].wait()
        return PassResult(Report(sandbox_id=sandbox_id, rounds=number), PassVerdict.SETTLED)

    begun_before = [0]
    async with asyncio.timeout(5), running(pass_) as supervisor:
        first = asyncio.create_task(supervisor.wait_for_pass(supervisor.mark("first")))
        assert await begun.get() == 0
        late = asyncio.create_task(supervisor.wait_for_pass(supervisor.mark("during the first")))
        gates[0].set()
        await first
        assert await begun.get() == 1
        for _ in range(10):
            await asyncio.sleep(0)
        assert not late.done()
        assert supervisor.is_due()
        gates[1].set()
        report = await late
    assert report is not None
    assert report.rounds == 1


async def test_a_failing_pass_is_tried_again_and_hurts_nobody() -> None:
    """The barrier counts, retries, and the waiter hears that there is no report."""
    script = Script(RuntimeError("boom"), PassVerdict.SETTLED)
    async with running(script) as supervisor:
        assert await _settled(supervisor, supervisor.mark("x")) is None
        async with asyncio.timeout(5):
            while script.runs < 2:
                await asyncio.sleep(0.01)
        assert not supervisor.has_failed
        assert supervisor.report is not None


async def test_retries_end() -> None:
    """A sandbox that never gets its VMM is not looked for for ever."""
    assert 20 <= sum(RETRY_S) <= 60


@pytest.mark.parametrize("count", [1, 3])
async def test_the_end_wakes_every_waiter(count: int) -> None:
    """When the sandbox is gone the loop ends and nobody waits in vain."""
    script = Script(PassVerdict.GONE)
    supervisor = Supervisor("pod")
    task = asyncio.create_task(supervisor.run(script))
    ticket = supervisor.mark("x") + 1  # a pass that will never come
    waiters = [asyncio.create_task(_settled(supervisor, ticket)) for _ in range(count)]
    async with asyncio.timeout(5):
        await task
        await asyncio.gather(*waiters)


async def test_a_young_thread_is_looked_at_again() -> None:
    """While a thread is young passes follow by themselves, and end once it is settled."""
    script = Script(PassVerdict.YOUNG, PassVerdict.YOUNG, PassVerdict.YOUNG, PassVerdict.SETTLED)
    settled = asyncio.Event()
    script.during = lambda: settled.set() if script.runs == 4 else None
    async with running(script) as supervisor:
        supervisor.mark("thread born")
        async with asyncio.timeout(5):
            await settled.wait()
        assert await _settled(supervisor, 1) is not None
        await asyncio.sleep(0)
    assert script.runs == 4


async def test_a_birth_waits_until_it_may_be_seen_what_was_born(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a VM that may get another vCPU; what waits for a pass, or another reason, ends that."""
    monkeypatch.setattr(sandboxes, "BORN_S", 3600.0)
    began: list[tuple[str, ...]] = []

    async def pass_(sandbox_id: str) -> PassResult:
        began.append(supervisor.cause.reasons)
        return PassResult(Report(sandbox_id=sandbox_id), PassVerdict.SETTLED, may_grow=True)

    async with running(pass_) as supervisor:
        assert await _settled(supervisor, supervisor.mark(BORN)) is not None
        ticket = supervisor.mark(BORN)
        await asyncio.sleep(0.01)
        assert began == [(BORN,)]
        assert await _settled(supervisor, ticket) is not None
        supervisor.mark(BORN)
        supervisor.mark("thread exited")
        async with asyncio.timeout(5):
            while len(began) < 3:
                await asyncio.sleep(0)
    assert began[1:] == [(BORN,), (BORN, "thread exited")]


async def test_a_long_pass_is_followed_by_a_rest() -> None:
    """A sandbox whose passes are long gets a fifth of the time at most."""
    ended: list[float] = []

    async def slow(sandbox_id: str) -> PassResult:
        ended.append(time.monotonic())
        return PassResult(Report(sandbox_id=sandbox_id), PassVerdict.SETTLED, worked_s=2 * LONG_S)

    async with asyncio.timeout(30), running(slow) as supervisor:
        while len(ended) < 3:
            supervisor.mark("thread born")
            await asyncio.sleep(0.001)
    assert ended[1] - ended[0] >= REST * 2 * LONG_S
    assert ended[2] - ended[1] >= REST * 2 * LONG_S


async def test_what_waits_for_a_pass_ends_the_rest() -> None:
    """A hook of the sandbox itself is answered at once, after however long a pass."""

    async def slow(sandbox_id: str) -> PassResult:
        return PassResult(Report(sandbox_id=sandbox_id), PassVerdict.SETTLED, worked_s=3600.0)

    async with running(slow) as supervisor:
        for reason in ("one", "two", "three"):
            assert await _settled(supervisor, supervisor.mark(reason)) is not None
        assert not supervisor.is_awaited()


async def test_a_pass_knows_what_asked_for_it_and_when() -> None:
    """The cause is what was told since the last pass; one that is only repeated keeps its cause."""
    script = Script(PassVerdict.RETRY, PassVerdict.SETTLED)
    causes: list[tuple[str, ...]] = []
    threads_only: list[bool] = []

    def during() -> None:
        causes.append(supervisor.cause.reasons)
        threads_only.append(supervisor.threads_only)

    async with running(script) as supervisor:
        script.during = during
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
    assert (causes[-1], threads_only[-1]) == (("thread born",), True)
    assert not threads_only[0]
    assert set(causes[0]) == {"hook", "audit"}
    assert len(causes) >= 3


async def test_what_is_marked_before_the_records_are_read_is_a_cause() -> None:
    """The pass under way does it, so it is named for it; of a repeated pass it is the only one."""
    script = Script(PassVerdict.SETTLED, PassVerdict.RETRY, PassVerdict.SETTLED)
    causes: list[Cause] = []
    marks = ["hook", "", "late"]

    def during() -> None:
        if reason := marks[len(causes)] if len(causes) < len(marks) else "":
            supervisor.mark(reason)
        supervisor.saw_all_marks()
        causes.append(supervisor.cause)

    async with running(script) as supervisor:
        script.during = during
        supervisor.mark("audit")
        async with asyncio.timeout(5):
            while len(causes) < 3:
                await asyncio.sleep(0.001)
    reasons = [one.reasons for one in causes[:3]]
    assert reasons == [("audit", "hook"), ("hook",), ("late",)]
    assert causes[2].since > causes[1].since


async def test_whether_somebody_waits_is_known() -> None:
    """From the wait for a ticket to its end, also where the one who waits gives up."""
    script = Script(PassVerdict.SETTLED)
    supervisor = Supervisor("pod")
    ticket = supervisor.mark("hook")
    assert not supervisor.is_awaited()
    waiting = asyncio.create_task(supervisor.wait_for_pass(ticket))
    given_up = asyncio.create_task(supervisor.wait_for_pass(ticket))
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
    script = Script(PassVerdict.RETRY, PassVerdict.RETRY, PassVerdict.SETTLED)
    causes: list[Cause] = []
    async with running(script) as supervisor:
        script.during = lambda: causes.append(supervisor.cause)
        supervisor.mark("hook")
        async with asyncio.timeout(5):
            while script.runs < 3:
                await asyncio.sleep(0.005)
    assert {cause.reasons for cause in causes} == {("hook",)}
    assert len({cause.since for cause in causes}) == 1


async def test_who_came_during_a_long_pass_waits_for_no_rest() -> None:
    """A hook that waits since then gets its pass at once, not after four times as long."""
    gate, begun = asyncio.Event(), asyncio.Event()

    async def pass_(sandbox_id: str) -> PassResult:
        begun.set()
        await gate.wait()
        return PassResult(Report(sandbox_id=sandbox_id), PassVerdict.SETTLED, worked_s=60 * LONG_S)

    async with running(pass_) as supervisor:
        supervisor.mark("first")
        await begun.wait()
        late = asyncio.create_task(supervisor.wait_for_pass(supervisor.mark("hook")))
        await asyncio.sleep(0)
        gate.set()
        async with asyncio.timeout(60 * LONG_S * REST / 2):
            await late


async def test_a_pass_after_a_failed_one_looks_at_processes_again() -> None:
    """The failed one may have been asked for by a new process, which it did not take in."""
    supervisor, looked = Supervisor("p1"), list[bool]()

    async def work(_: str) -> PassResult:
        looked.append(not supervisor.threads_only)
        if len(looked) == 1:
            raise OSError("cannot list processes now")
        return PassResult(Report("p1"), PassVerdict.GONE)

    supervisor.mark("process born")
    await asyncio.wait_for(supervisor.run(work), 10)
    assert looked == [True, True]
