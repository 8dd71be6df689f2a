"""Cpusets that are pending: sent at once where there is a way, in order, and again if it failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from kata_pin.base.allocation import AllocState
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.values import CpuClass
from kata_pin.options.allocation import ledger as books
from kata_pin.options.allocation import push as module
from kata_pin.options.allocation.push import Pusher
from kata_pin.peers.cri import CriClient, RuntimeUnavailable, UpdateRefused
from kata_pin.peers.nri.plugin import NriPlugin
from kata_pin.peers.nri.replies import Cpuset
from kata_pin.records.containers import Registry
from tests.support.allotted import Host, Moves, allocator, ordered, request, settings
from tests.support.world import cpus

ALL = CpuSet(range(8))


class Runtime:
    """The NRI plugin at a runtime: what is sent to it, and what it answers."""

    def __init__(self) -> None:
        self.updates_problem = ""
        self.sent: list[tuple[str, str]] = []
        self.answers: deque[BaseException | None] = deque()
        self.hangs: set[str] = set()
        self.refuses: dict[str, Exception] = {}
        self.takes_s: dict[str, float] = {}
        self.applied: Callable[[str, Cpuset], None] = lambda _id, _cpuset: None

    async def update(self, container_id: str, cpuset: Cpuset) -> None:
        self.sent.append((container_id, str(cpuset.cpus)))
        await asyncio.sleep(0)
        if container_id in self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(self.takes_s.get(container_id, 0))
        if container_id in self.refuses:
            raise self.refuses[container_id]
        answer = self.answers.popleft() if self.answers else None
        if answer is not None:
            raise answer
        self.applied(container_id, cpuset)


class World(Moves):
    """An allocator with containers that the runtime knows, what pushes to it, and its passes."""

    def __init__(self, registry: Registry, *, nri: bool = True, **fields: Any) -> None:
        super().__init__()
        self.allocator = allocator(registry, Host())
        self.ledger = self.allocator.ledger
        self.runtime = Runtime()
        self.passes: list[str] = []
        self.pass_held: asyncio.Event | None = None
        self.pusher = Pusher(
            self.allocator,
            settings(**fields),
            passes=self,
            plugin=cast("NriPlugin", self.runtime) if nri else None,
            cri=CriClient(fields["cri"]) if "cri" in fields else None,
        )

    async def another(self, sandbox_id: str) -> None:
        """End a pass, unless it is held."""
        self.passes.append(f"{sandbox_id} after {len(self.runtime.sent)}")
        if self.pass_held is not None:
            await self.pass_held.wait()

    def admit(self, name: str, cpu_class: str = "", *, has: str = "0-7", **fields: Any) -> None:
        """Have a container made before anything is pushed; the runtime gave it `has`."""
        self.allocator.admit(request(name, cpu_class, **fields))
        self.ledger.reported(f"c-{name}", Cpuset(cpus(has)))

    @property
    def pending(self) -> set[str]:
        return set(self.ledger.pending(self.allocator.now))


@pytest.fixture(autouse=True)
async def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only while every task waits, and then at once.

    How busy the machine is changes neither what is due first nor how long a push takes.
    """
    selector = cast("Any", asyncio.get_running_loop())._selector
    select, now = selector.select, time.monotonic()

    def wait(seconds: float | None) -> object:
        nonlocal now
        ready = select(seconds and 0)
        now += 0 if ready else seconds or 0
        return ready

    monkeypatch.setattr(selector, "select", wait)
    monkeypatch.setattr("time.monotonic", lambda: now)


@pytest.fixture
def world(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(books, "RETRY_S", (0.05, 0.1))
    return World(registry)


@contextlib.asynccontextmanager
async def running(world: World) -> AsyncIterator[None]:
    task = asyncio.create_task(world.pusher.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(true: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(10):
            while not true():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{what} did not come") from None


async def test_an_answer_on_its_way_comes_first(world: World) -> None:
    """What an answer takes along within the grace is not sent again."""
    world.admit("web", kata=False)
    world.admit("db", "exclusive", cpus=2, kata=False, has="")
    async with running(world):
        world.ledger.wake()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(world.ledger.updates(world.allocator.now)) == 2
        await asyncio.sleep(3 * module.GRACE_S)
    assert world.runtime.sent == []


async def test_a_vm_is_pinned_between_two_steps(world: World) -> None:
    """A cpuset that moves: both, then a pass over the sandbox, and only then the new one."""
    world.admit("db", "exclusive", cpus=2)
    own = world.allocator.state.exclusive
    there = CpuSet(list(ALL - own)[:2])
    world.ledger.reported("c-db", Cpuset(there))
    world.pass_held = asyncio.Event()
    async with running(world):
        world.ledger.wake()
        await until(lambda: world.passes, "the pass")
        assert world.runtime.sent == [("c-db", str(there | own))]
        world.pass_held.set()
        await until(lambda: not world.pending, "the end")
    assert world.runtime.sent[1:] == [("c-db", str(own))]
    assert world.passes == ["s-db after 1"]


async def test_what_changed_while_a_pass_was_awaited(world: World) -> None:
    """What is wanted by then is sent, not what was wanted before."""
    world.admit("db", "exclusive", cpus=2)
    world.pass_held = asyncio.Event()
    async with running(world):
        world.ledger.wake()
        await until(lambda: world.passes, "the pass")
        world.allocator.change(ordered(request("db", "exclusive", cpus=2), CpuClass.NONE), "order")
        world.pass_held.set()
        world.ledger.wake()
        await asyncio.sleep(3 * module.GRACE_S)
    assert world.allocator.state.shared == ALL
    assert world.runtime.sent == []  # all CPUs are what it has


async def test_a_pass_that_does_not_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds up its own container only, and for a while."""
    monkeypatch.setattr(module, "PASS_S", 0.05)
    world.admit("db", "exclusive", cpus=2)
    world.admit("web", kata=False)
    world.pass_held = asyncio.Event()
    async with running(world):
        world.ledger.wake()
        await until(lambda: world.pending == {"c-db"} and world.ledger.problems, "the other one")
        assert "no pass over its sandbox" in world.ledger.problems["c-db"]
        world.pass_held.set()
        await until(lambda: not world.pending, "the next try")


async def test_who_fails_comes_after_all_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A VM that hangs is retried when no other container waits."""
    monkeypatch.setattr(books, "RETRY_S", (0.0,))
    for name in ("hung", "a", "b"):
        world.admit(name, kata=False)
    world.admit("db", "exclusive", cpus=2, kata=False, has="")
    world.runtime.answers.extend([UpdateRefused("slow"), UpdateRefused("slow")])
    async with running(world):
        world.ledger.wake()
        await until(lambda: not world.pending, "everything")
    tries = [name for name, _ in world.runtime.sent]
    assert tries[:2] == ["c-hung", "c-a"]
    assert set(tries[2:4]) == {"c-b", "c-db"}
    assert set(tries[4:]) == {"c-hung", "c-a"}


@pytest.mark.parametrize("error", [RuntimeUnavailable("no socket"), ZeroDivisionError("oops")])
async def test_nobody_stops_the_others(
    world: World, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A container that fails as if the runtime was gone is put off: others come before.

    An error of our own is logged, and ends nothing.
    """
    for name in ("bad", "a", "b"):
        world.admit(name, kata=False)
    world.admit("db", "exclusive", cpus=2, kata=False, has="")
    world.runtime.refuses = {"c-bad": error}
    async with running(world):
        world.ledger.wake()
        await until(lambda: world.pending == {"c-bad"}, "all others")
        assert {name for name, _ in world.runtime.sent[1:4]} == {"c-a", "c-b", "c-db"}
        assert world.ledger.problems == {}
        world.runtime.refuses.clear()
        await until(lambda: not world.pending, "the next try")
    assert ("cpusets not sent: oops" in caplog.text) is isinstance(error, ZeroDivisionError)


async def test_those_who_fail_take_turns(world: World) -> None:
    """While there is no runtime the one that was not tried for longest is tried."""
    for name in ("a", "b"):
        world.admit(name, kata=False)
    world.admit("db", "exclusive", cpus=2, kata=False, has="")
    world.runtime.answers.extend([RuntimeUnavailable("no socket")] * 6)
    async with running(world):
        world.ledger.wake()
        await until(lambda: len(world.runtime.sent) >= 6, "six tries")
    tries = [name for name, _ in world.runtime.sent[:6]]
    assert set(tries[:3]) == {"c-a", "c-b", "c-db"}
    assert tries[3:] == tries[:3]


async def test_it_sleeps_until_somebody_is_due(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the runtime's trouble is no loop where all that is pending waits for longer."""
    monkeypatch.setattr(books, "RETRY_S", (0.02, 1000.0))
    for name in ("bad", "web"):
        world.admit(name, kata=False)
    world.admit("db", "exclusive", cpus=2, kata=False, has="0-1")
    world.ledger.reported("c-db", Cpuset(world.allocator.state.exclusive))
    world.runtime.refuses = {"c-bad": UpdateRefused("busy")}
    rounds = 0
    pending = world.ledger.pending

    def counted(state: AllocState) -> dict[str, Cpuset]:
        nonlocal rounds
        rounds += 1
        return pending(state)

    async with running(world):
        world.ledger.wake()
        await until(lambda: world.pending == {"c-bad"}, "the other one")
        await until(lambda: len(world.runtime.sent) == 3, "the second refusal")
        world.admit("log", kata=False)
        world.runtime.refuses["c-log"] = RuntimeUnavailable("no socket")
        world.ledger.wake()
        await until(lambda: world.pusher.problem, "the trouble")
        world.ledger.ended("c-log")
        monkeypatch.setattr(world.ledger, "pending", counted)
        await asyncio.sleep(0.3)
    assert world.pending == {"c-bad"}
    assert 1 <= rounds <= 3


async def test_slow_containers_share_little_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one try each, slow containers rest for long, whatever is decided; others do not."""
    monkeypatch.setattr(books, "SLOW_S", 0.03)
    monkeypatch.setattr(books, "RETRY_S", (0.005,))
    hung = [f"c-hung{one}" for one in range(4)]
    for name in hung:
        world.admit(name.removeprefix("c-"), kata=False)
    world.admit("web", kata=False)
    world.admit("db", "exclusive", cpus=2, kata=False, has="")
    world.runtime.takes_s = dict.fromkeys(hung, 0.05)
    world.runtime.refuses = dict.fromkeys(hung, UpdateRefused("no answer"))
    async with running(world):
        world.ledger.wake()
        await until(lambda: len(world.runtime.sent) == 6, "a try of each")
        await until(lambda: len(world.ledger.problems) == 4, "four failures")
        for one in range(3):
            world.allocator.admit(request(f"own{one}", "exclusive", cpus=1, kata=False))
            world.ledger.wake()
            await until(lambda: world.pending == set(hung), "the fast one")
        await asyncio.sleep(0.3)
    tries = [name for name, _ in world.runtime.sent]
    assert [tries.count(name) for name in hung] == [1] * 4
    assert tries.count("c-web") == 4


async def test_a_slow_container_comes_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its rest has ended; a recreated container is not slow."""
    monkeypatch.setattr(books, "SLOW_S", 0.03)
    monkeypatch.setattr(books, "REST", 0)
    monkeypatch.setattr(books, "LONGEST_REST_S", 0)
    for name in ("hung", "web"):
        world.admit(name, kata=False)
    world.admit("db", "exclusive", cpus=2, kata=False, has="0-1")
    world.ledger.reported("c-db", Cpuset(world.allocator.state.exclusive))
    world.runtime.takes_s = {"c-hung": 0.05}
    own = 0

    async def tries() -> list[str]:
        nonlocal own
        world.runtime.sent.clear()
        world.allocator.admit(request(f"own{own}", "exclusive", cpus=1, kata=False))
        own += 1
        world.ledger.wake()
        await until(lambda: not world.pending, "everything")
        return [name for name, _ in world.runtime.sent]

    async with running(world):
        assert await tries() == ["c-hung", "c-web"]
        assert await tries() == ["c-web", "c-hung"]
        web, hung = (world.ledger.get(one) for one in ("c-web", "c-hung"))
        assert web is not None
        assert hung is not None
        for one in ("c-web", "c-hung"):
            world.ledger.ended(one)
        world.ledger.wake()
        await asyncio.sleep(3 * module.GRACE_S)
        world.ledger.reported("c-hung", hung.confirmed or Cpuset())
        world.ledger.reported("c-web", web.confirmed or Cpuset())
        assert await tries() == ["c-hung", "c-web"]


async def test_an_error_before_anything_is_sent(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is pending cannot be computed: no loop, and it is retried, later each time."""
    monkeypatch.setattr(books, "RETRY_S", (0.02, 1000.0))
    world.admit("web", kata=False)
    world.admit("db", "exclusive", cpus=2, kata=False, has="")
    world.runtime.answers.append(UpdateRefused("busy"))

    def broken(_: AllocState) -> dict[str, Cpuset]:
        raise OSError("no sysfs")

    async with running(world):
        world.ledger.wake()
        await until(lambda: world.ledger.problems, "the refusal")
        monkeypatch.setattr(world.ledger, "pending", broken)
        await until(lambda: caplog.text.count("no sysfs") == 2, "two tries")
        await asyncio.sleep(5 * module.GRACE_S)
    assert caplog.text.count("no sysfs") == 2


async def test_a_refusal_after_there_was_no_runtime(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged although the container was put off before."""
    world.admit("web", kata=False)
    world.admit("db", "exclusive", cpus=2, kata=False, has="")
    world.ledger.reported("c-db", Cpuset(world.allocator.state.exclusive))
    world.runtime.answers.extend([RuntimeUnavailable("no socket"), UpdateRefused("busy")])
    async with running(world):
        world.ledger.wake()
        await until(lambda: not world.pending, "the third try")
    assert "c-web keeps its cpuset: busy" in caplog.text


async def test_an_event_from_before(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A report of the former cpuset during a push is no failure: it is sent again."""
    caplog.set_level(logging.INFO)
    world.admit("web", kata=False)
    world.admit("db", "exclusive", cpus=2, kata=False, has="")
    world.ledger.reported("c-db", Cpuset(world.allocator.state.exclusive))

    def told(one: str, _cpuset: Cpuset) -> None:
        if len(world.runtime.sent) == 1:
            world.ledger.reported(one, Cpuset(ALL))

    world.runtime.applied = told
    async with running(world):
        world.ledger.wake()
        await until(lambda: not world.pending, "the second time")
    assert len(world.runtime.sent) == 2
    assert world.pusher.sent == {("nri", True): 2}
    assert caplog.text == ""


async def test_a_new_decision_does_not_wait_for_the_next_try(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that was refused is tried at once with another cpuset."""
    monkeypatch.setattr(books, "RETRY_S", (1000.0,))
    world.admit("web", kata=False)
    world.admit("db", "exclusive", cpus=2, kata=False, has="")
    world.ledger.reported("c-db", Cpuset(world.allocator.state.exclusive))
    world.runtime.answers.append(UpdateRefused("busy"))
    async with running(world):
        world.ledger.wake()
        await until(lambda: world.ledger.problems, "the refusal")
        world.allocator.admit(request("more", "exclusive", cpus=1, kata=False))
        world.ledger.wake()
        await until(lambda: not world.pending, "the other cpuset")


async def test_a_missing_library_is_said(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket in the settings without gRPC installed is a warning at start."""
    monkeypatch.setattr("kata_pin.peers.cri.LIBRARY", "not_here")
    async with running(World(registry, cri="/run/c.sock")):
        await until(lambda: "pip install 'kata-pin[cri]'" in caplog.text, "the warning")


@pytest.mark.parametrize("error", [UpdateRefused("busy"), RuntimeUnavailable("no socket")])
async def test_no_way_is_no_loop(world: World, error: Exception) -> None:
    """A way that goes while something is to be tried again leaves it pending, and rests."""
    world.admit("web", kata=False)
    world.admit("db", "exclusive", cpus=2, kata=False, has="")
    world.runtime.answers.extend([error] * 2)
    async with running(world):
        world.ledger.wake()
        await until(lambda: world.ledger.problems or world.pusher.problem, "the trouble")
        world.runtime.updates_problem = "gone"
        await until(
            lambda: not world.ledger.problems and not world.pusher.problem, "the end of tries"
        )
        assert world.pusher._retry_in() is None
    assert world.pending
