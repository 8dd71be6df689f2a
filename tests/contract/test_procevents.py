"""Process events keep their contract over a fake connector, new and old, and the real one."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from kata_pin.base.errors import HostError
from kata_pin.linux.events import Connect, Event, NewProcess, NewThread, ProcEvents, TaskExit
from kata_pin.rights.broker.libc import process_events
from tests.support.fakeconnector import FakeConnector
from tests.support.specimen import specimen

KTHREADD = 2
DEADLINE_S = 10.0


@dataclass
class Subject:
    """Events opened on one tracked process that can be changed, and one that is not tracked."""

    events: ProcEvents
    tracked: set[int]
    pid: int
    stranger: int
    grow: Callable[[int], int]
    end: Callable[[int, int], None]

    async def until(self, wanted: Event) -> list[Event]:
        """Return all events up to the wanted one, without new kernel threads of the machine."""
        seen: list[Event] = []
        async with asyncio.timeout(DEADLINE_S):
            async for batch in self.events:
                assert batch, "a batch is never empty"
                seen += [
                    event
                    for event in batch
                    if not (isinstance(event, NewProcess) and event.ppid == KTHREADD)
                ]
                if wanted in batch:
                    return seen
        raise AssertionError("the events ended")


async def fake_subject(filters: bool) -> AsyncIterator[Subject]:
    """Give the subject on a connector that knows filters, or not."""
    fake = FakeConnector(filters=filters)
    tracked = {500}
    tids = iter(range(501, 10_000))

    def grow(tgid: int) -> int:
        tid = next(tids)
        fake.born(tid, tgid)
        fake.named(tid, tgid)
        return tid

    events = ProcEvents(tracked, connect=fake.connect)
    await events.open()
    yield Subject(events, tracked, 500, 600, grow, lambda tgid, tid: fake.exited(tid, tgid))
    events.close()
    fake.close()


async def real_subject() -> AsyncIterator[Subject]:
    """Give the subject on the running kernel; skip where it has no process events."""
    with specimen() as tracked, specimen() as stranger:
        both = {one.pid: one for one in (tracked, stranger)}
        shared = {tracked.pid}
        events = ProcEvents(shared)
        try:
            await events.open()
        except HostError as error:
            pytest.skip(str(error))
        yield Subject(
            events,
            shared,
            tracked.pid,
            stranger.pid,
            lambda tgid: both[tgid].grow(1)[0],
            lambda tgid, tid: both[tgid].end(tid),
        )
        events.close()


@pytest.fixture(params=["fake", "fake before 6.6", "running kernel"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """Give the same subject three times."""
    source = {
        "fake": lambda: fake_subject(filters=True),
        "fake before 6.6": lambda: fake_subject(filters=False),
        "running kernel": real_subject,
    }[request.param]
    async for one in source():
        yield one


async def test_birth_and_exit_of_a_thread(subject: Subject) -> None:
    """A tracked process's new thread is reported with both ids, and then its exit."""
    tid = subject.grow(subject.pid)
    assert await subject.until(NewThread(subject.pid, tid)) == [NewThread(subject.pid, tid)]
    subject.end(subject.pid, tid)
    assert await subject.until(TaskExit(subject.pid, tid)) == [TaskExit(subject.pid, tid)]


async def test_strangers_are_not_told(subject: Subject) -> None:
    """Threads of a process that is not tracked never reach the consumer."""
    for _ in range(5):
        subject.end(subject.stranger, subject.grow(subject.stranger))
    tid = subject.grow(subject.pid)
    assert await subject.until(NewThread(subject.pid, tid)) == [NewThread(subject.pid, tid)]


async def test_tracked_is_shared(subject: Subject) -> None:
    """What is added to, or taken out of, the tracked set counts from then on."""
    subject.tracked.add(subject.stranger)
    tid = subject.grow(subject.stranger)
    await subject.until(NewThread(subject.stranger, tid))
    subject.tracked.remove(subject.stranger)
    subject.end(subject.stranger, tid)
    last = subject.grow(subject.pid)
    assert await subject.until(NewThread(subject.pid, last)) == [NewThread(subject.pid, last)]


async def test_many_at_once(subject: Subject) -> None:
    """Of a burst of births none is lost or doubled."""
    tids = [subject.grow(subject.pid) for _ in range(60)]
    seen = await subject.until(NewThread(subject.pid, tids[-1]))
    assert seen == [NewThread(subject.pid, tid) for tid in tids]


async def test_close_ends_the_iteration(subject: Subject) -> None:
    """A consumer that waits is let go when the events are closed; closing again does nothing."""
    collected: list[Event] = []

    async def consume() -> None:
        async for batch in subject.events:
            collected.extend(batch)

    consumer = asyncio.create_task(consume())
    await asyncio.sleep(0)
    subject.events.close()
    subject.events.close()
    async with asyncio.timeout(DEADLINE_S):
        await consumer
    assert collected == []


async def test_cancelled_consumer_loses_nothing(subject: Subject) -> None:
    """A consumer that gives up waiting finds what came meanwhile when it waits again."""
    with suppress(TimeoutError):
        await asyncio.wait_for(anext(subject.events), 0.01)
    tid = subject.grow(subject.pid)
    assert await subject.until(NewThread(subject.pid, tid)) == [NewThread(subject.pid, tid)]


async def test_children_of_tracked_processes() -> None:
    """On the running kernel a fork of a tracked process is reported, and not as a thread."""
    events = ProcEvents({os.getpid()})
    try:
        await events.open()
    except HostError as error:
        pytest.skip(str(error))
    child = await asyncio.to_thread(subprocess.Popen, ["/bin/true"])
    seen: list[Event] = []
    async with asyncio.timeout(DEADLINE_S):
        while NewProcess(child.pid, os.getpid()) not in seen:
            seen += await anext(events)
    child.wait()
    events.close()
    assert NewThread(child.pid, child.pid) not in seen


async def test_fake_messages_have_the_kernel_s_length() -> None:
    """The fake's messages are as long as those of the running kernel."""
    lengths: list[set[int]] = []

    class Measuring(socket.socket):
        def recv_into(self, *args: Any) -> int:
            size = super().recv_into(*args)
            lengths[-1].add(size)
            return size

    fake = FakeConnector()
    for connect in (process_events, fake.connect):
        lengths.append(set())

        def measured(token: int, *, execs: bool, connect: Connect = connect) -> socket.socket:
            return Measuring(fileno=connect(token, execs=execs).detach())

        events = ProcEvents(set(), connect=measured)
        try:
            await events.open()
        except HostError as error:
            pytest.skip(str(error))
        events.close()
    fake.close()
    assert lengths[0] == lengths[1]
