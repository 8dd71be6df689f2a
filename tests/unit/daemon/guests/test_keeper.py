"""A keeper and its guest: what is sent, when, and what becomes of a guest that does not behave."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kata_pin.config.guest import Guest
from kata_pin.daemon.guests.keeper import (
    MISSES,
    RETRY_S,
    WIDEN_S,
    Decide,
    Keeper,
    Shared,
)
from kata_pin.daemon.guests.probe import GuestProbe
from kata_pin.daemon.guests.status import Goal, GuestPlan, GuestState, Proof, plan_guest
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.guests import GuestCpusets
from kata_pin.errors import AgentUnavailable, AgentUnknown
from kata_pin.guest.address import parse_address
from kata_pin.guest.agent import AgentClient
from kata_pin.host.root import HOST
from kata_pin.model.guest_map import GuestFacts
from kata_pin.model.placement import Report
from kata_pin.model.sandbox import Container, GuestTopology, Sandbox, Vmm
from kata_pin.policy.placement.place import place
from tests.support.playedguest import Mood, PlayedGuest
from tests.support.waiting import SCALE
from tests.support.world import exclusive, node, sandbox, shared, vcpu, vcpus

OWN, LOG = exclusive("own", "4"), shared("log", "0-1")
TWO = GuestTopology(boot=2, maximum=4, sockets=4)


@pytest.fixture
def guest() -> Iterator[PlayedGuest]:
    folder = Path(tempfile.mkdtemp(prefix="gk"))
    with PlayedGuest(folder / "agent") as one:
        yield one
    shutil.rmtree(folder)


class Case:
    """A keeper of sandbox `pod` with its registry, and a guest that can be reached or not."""

    def __init__(
        self, folder: Path, guest: PlayedGuest | None, turns: asyncio.Semaphore | None = None
    ) -> None:
        self.settings = Guest(connect_ms=200, call_ms=200)
        self.registry = Registry(str(folder / "registry.db"), boot_id="boot")
        self.registry.adopt(Container("own", "pod"))
        self.book = GuestCpusets(self.registry)
        self.guest = guest
        self.nowhere: type[AgentUnavailable] = AgentUnavailable
        self.topology = TWO
        self.threads = [vcpu(0), vcpu(1, on="4")]  # the pair stands, and is kept
        shared = Shared(
            lambda: self.settings, self.book, self._connect, turns or asyncio.Semaphore(1)
        )
        self.keeper = Keeper("pod", shared, GuestProbe(HOST, lambda: self.settings))

    def _connect(self, _sandbox_id: str, _vmm: Vmm, patience: int) -> AgentClient:
        if self.guest is None:
            raise self.nowhere("nobody knows where")
        deadline_s = 0.2 * patience
        return AgentClient(parse_address(self.guest.url), connect_s=deadline_s, call_s=deadline_s)

    def pod(self, *containers: Container) -> Sandbox:
        """Return the sandbox with these containers."""
        return sandbox(*(containers or (OWN, LOG)), guest=self.topology)

    def decide(self, facts: GuestFacts, *containers: Container) -> GuestPlan | None:
        """Return what a pass means for the guest."""
        pod, threads = self.pod(*containers), self.threads
        report = Report("pod", tuple(threads), place(pod, threads, node()))
        return plan_guest(pod, report, node(), facts, machine="x86_64")

    def take(self, *containers: Container, goal: Goal = Goal.KEEP, **how: bool) -> None:
        """Hand over a pass."""
        vmm = self.pod().vmm
        assert vmm is not None
        self.keeper.take(vmm, lambda facts: self.decide(facts, *containers), goal, **how)

    def state(self) -> GuestState:
        """Return how it is shown."""
        look = self.decide(self.keeper.facts)
        assert look is not None
        return self.keeper.view(look).state

    def proofs(self) -> dict[str, Proof]:
        """Return what is known of each cpuset."""
        look = self.decide(self.keeper.facts)
        assert look is not None
        return {name: sent.proof for name, sent in self.keeper.view(look).sent.items()}


NewCase = Callable[..., Case]


@pytest.fixture
def new_case(tmp_path: Path) -> Iterator[NewCase]:
    """Yield what makes a case with such a guest; registries are closed at the end."""
    with contextlib.ExitStack() as closing:

        def made(
            guest: PlayedGuest | None, folder: str = "", turns: asyncio.Semaphore | None = None
        ) -> Case:
            (tmp_path / folder).mkdir(exist_ok=True)
            case = Case(tmp_path / folder, guest, turns)
            closing.callback(case.registry.close)
            return case

        yield made


async def test_said_once_and_again_when_asked(new_case: NewCase, guest: PlayedGuest) -> None:
    """A pass that changes nothing says nothing; one after Kata's work says all again."""
    case = new_case(guest)
    case.take()
    assert case.state() is GuestState.PENDING
    await case.keeper.attempt()
    assert guest.cpus == {"own": "1", "log": "0"}
    assert case.state() is GuestState.APPLIED
    case.take()
    await case.keeper.attempt()
    assert len(guest.said) == 2
    case.take(again=True)
    await case.keeper.attempt()
    assert len(guest.said) == 4


async def test_other_vcpus_mean_saying_it_again(new_case: NewCase, guest: PlayedGuest) -> None:
    """Kata brings hotplugged vCPUs online and sets cpusets anew meanwhile."""
    case = new_case(guest)
    case.take()
    await case.keeper.attempt()
    case.threads.append(vcpu(3))
    case.take()
    await case.keeper.attempt()
    assert guest.said.count(("own", "1")) == 2


async def test_noted_before_it_is_said(new_case: NewCase, guest: PlayedGuest) -> None:
    """Without a note nothing is sent: a killed daemon could never give it back."""
    case = new_case(guest)
    case.take()
    case.registry.close()
    await case.keeper.attempt()
    assert guest.said == []
    assert case.state() is GuestState.FAILED


async def test_a_new_daemon_says_it_again_and_can_give_it_back(
    new_case: NewCase, guest: PlayedGuest
) -> None:
    """What the book holds is sent to be unknown until it was sent again."""
    first = new_case(guest)
    first.take()
    await first.keeper.attempt()
    first.registry.close()
    second = new_case(guest)
    second.take()
    await second.keeper.attempt()
    assert len(guest.said) == 4
    second.registry.close()
    third = new_case(guest)
    third.take(goal=Goal.GIVE_BACK)
    await third.keeper.attempt()
    assert guest.cpus == {"own": "0-1", "log": "0-1"}


async def test_giving_back_is_finished_before_it_is_left(
    new_case: NewCase, guest: PlayedGuest
) -> None:
    """A daemon that sets nothing any more still ends the undo that was asked for."""
    case = new_case(guest)
    case.take()
    await case.keeper.attempt()
    case.take(goal=Goal.GIVE_BACK)
    case.take(goal=Goal.LEAVE)
    await case.keeper.attempt()
    assert guest.cpus == {"own": "0-1", "log": "0-1"}


async def test_what_was_given_back_follows_hotplug(new_case: NewCase, guest: PlayedGuest) -> None:
    """A cpuset cannot be taken away, so it grows with the guest."""
    case = new_case(guest)
    case.take()
    await case.keeper.attempt()
    case.take(goal=Goal.GIVE_BACK)
    await case.keeper.attempt()
    case.threads.append(vcpu(3))  # its number is not known: all that may ever be
    case.take(goal=Goal.GIVE_BACK)
    await case.keeper.attempt()
    assert guest.cpus == {"own": "0-3", "log": "0-3"}


async def test_containers_that_are_gone_are_forgotten(
    new_case: NewCase, guest: PlayedGuest
) -> None:
    """Nobody speaks of them again, and the book has no line of them."""
    case = new_case(guest)
    case.take()
    await case.keeper.attempt()
    guest.said.clear()
    case.take(OWN, again=True)
    await case.keeper.attempt()
    assert guest.said == [("own", "1")]
    assert set(case.book.sent("pod")) == {"own"}


async def test_rests_grow(new_case: NewCase) -> None:
    """A guest that cannot be reached is tried ever more rarely; an operator need not wait."""
    case = new_case(None)
    tries = 0

    async def counted() -> None:
        nonlocal tries
        await original()
        tries += 1

    original, case.keeper.attempt = case.keeper.attempt, counted  # type: ignore[method-assign]
    case.take()
    task = asyncio.create_task(case.keeper.run())
    try:
        async with asyncio.timeout(10):
            while tries < 3:  # at once, after half a second, after another one
                await asyncio.sleep(0.01)
        for _ in range(50):
            case.take(again=True)
            await asyncio.sleep(0)
        assert tries == 3
        case.take(insist=True)
        async with asyncio.timeout(RETRY_S[2] * 0.8):
            while tries < 4:
                await asyncio.sleep(0.01)
    finally:
        case.keeper.stop()
        await asyncio.wait_for(task, 5)


async def test_an_unknown_address_is_not_retried(new_case: NewCase, guest: PlayedGuest) -> None:
    """Nobody is asked again and again where the agent is; Kata's next event may say so."""
    case = new_case(None)
    case.nowhere = AgentUnknown
    case.take()
    began = time.monotonic()
    task = asyncio.create_task(case.keeper.run())
    try:
        async with asyncio.timeout(10):
            await case.keeper.settled()
        assert case.state() is GuestState.UNREACHABLE
        assert case.keeper._rest_until > began + RETRY_S[-1]
        case.guest = guest
        case.take()  # a pass without an event of Kata's
        await asyncio.sleep(0.05)
        assert case.state() is GuestState.UNREACHABLE
        case.take(again=True)
        async with asyncio.timeout(10):
            while case.state() is not GuestState.APPLIED:
                await asyncio.sleep(0.01)
    finally:
        case.keeper.stop()
        await task


async def test_stopped_while_it_rests(new_case: NewCase) -> None:
    """A sandbox that is over ends its keeper at once, whatever it waits for."""
    case = new_case(None)
    case.take()
    task = asyncio.create_task(case.keeper.run())
    await case.keeper.settled()
    case.keeper.stop()
    await asyncio.wait_for(task, 1)


@pytest.mark.parametrize("mood", [Mood.HANGS, Mood.FLOODS, Mood.DENIES])
async def test_an_attempt_ends(new_case: NewCase, guest: PlayedGuest, mood: Mood) -> None:
    """Whatever the guest does, an attempt ends within its deadlines and leaves no connection."""
    case = new_case(guest)
    guest.mood = mood
    case.take()
    began = time.monotonic()
    for _ in range(MISSES):
        await case.keeper.attempt()
    assert time.monotonic() - began < 6
    assert case.state() in {GuestState.UNREACHABLE, GuestState.DENIED}
    assert set(case.proofs().values()) == {Proof.REFUSED}


async def test_one_miss_is_not_unreachable(new_case: NewCase, guest: PlayedGuest) -> None:
    """It is said after several in a row, and what was confirmed before stays with its age."""
    case = new_case(guest)
    case.take()
    await case.keeper.attempt()
    guest.mood = Mood.HANGS
    for expected in (GuestState.PENDING, GuestState.PENDING, GuestState.UNREACHABLE):
        case.take(again=True)
        await case.keeper.attempt()
        look = case.decide(case.keeper.facts)
        assert look is not None
        view = case.keeper.view(look)
        assert view.state is expected
        assert view.asked_s is not None


async def test_a_slow_guest_gets_more_time(new_case: NewCase, guest: PlayedGuest) -> None:
    """Deadlines double with each miss, and stay while the guest needs them."""
    case = new_case(guest)
    guest.mood = Mood.SLOW
    case.take()
    tries = 0
    while case.state() is not GuestState.APPLIED:  # two misses, more where the machine is busy
        assert tries <= 5
        await case.keeper.attempt()
        tries += 1
    assert tries > 1
    case.take(again=True)
    await case.keeper.attempt()
    assert case.state() is GuestState.APPLIED
    guest.mood = Mood.HONEST
    for _ in range(3):
        case.take(again=True)
        await case.keeper.attempt()
    guest.mood = Mood.SLOW
    case.take(again=True)
    await case.keeper.attempt()
    assert case.state() is GuestState.PENDING


async def test_few_guests_are_talked_to_at_once(new_case: NewCase, guest: PlayedGuest) -> None:
    """However many guests hang, no more than the turns there are have a connection."""
    guest.mood = Mood.HANGS
    cases = []
    turns = asyncio.Semaphore(2)
    for number in range(6):
        cases.append(new_case(guest, str(number), turns))
        cases[-1].take()
    most = 0
    attempts = asyncio.gather(*(case.keeper.attempt() for case in cases))
    while not attempts.done():
        most = max(most, guest.connected)
        await asyncio.sleep(0.005)
    assert 0 < most <= 4  # one that was closed may still be counted by the other side
    assert {case.state() for case in cases} == {GuestState.PENDING}


async def test_one_refused_container_holds_nobody_up(new_case: NewCase, guest: PlayedGuest) -> None:
    """A container that the agent does not know is tried again, the others are told."""
    case = new_case(guest)
    guest.unknown.add("own")
    case.take()
    await case.keeper.attempt()
    assert guest.cpus == {"log": "0"}
    assert case.proofs() == {"own": Proof.REFUSED, "log": Proof.NONE}
    assert case.state() is GuestState.FAILED


async def test_widened_first(new_case: NewCase, guest: PlayedGuest) -> None:
    """Before vCPUs move a container may use old and new guest CPUs; nothing narrows meanwhile."""
    case = new_case(guest)
    both = (exclusive("a", "4"), exclusive("b", "5"))
    case.topology = GuestTopology(boot=3, maximum=3, sockets=3)
    case.threads = vcpus(0, 1, 2)
    await _promptly(case, *both)
    before = dict(guest.cpus)

    def later(facts: GuestFacts) -> GuestPlan | None:
        look = case.decide(facts, *both)
        assert look is not None
        swap = {one.container_id: one.cpus for one in look.cpusets}
        other = {"a": swap["b"], "b": swap["a"]}
        sets = tuple(replace(one, cpus=other[one.container_id]) for one in look.cpusets)
        return replace(look, cpusets=sets)

    await case.keeper.widen(later)
    assert guest.cpus == {"a": "1-2", "b": "1-2"}
    case.keeper.audit()
    await case.keeper.attempt()  # an audit meanwhile must not narrow
    assert guest.cpus == {"a": "1-2", "b": "1-2"}
    vmm = case.pod().vmm
    assert vmm is not None
    case.keeper.take(vmm, later, Goal.KEEP)
    await case.keeper.attempt()
    assert guest.cpus == {"a": before["b"], "b": before["a"]}


async def test_a_slow_guest_delays_a_pass_once(new_case: NewCase, guest: PlayedGuest) -> None:
    """The first time costs the budget, the next times nothing, until it has answered again."""
    case = new_case(guest)
    await _promptly(case)
    guest.mood = Mood.HANGS
    first, second = await _widening_s(case), await _widening_s(case)
    assert WIDEN_S <= first < WIDEN_S + 0.2 * SCALE
    assert second < WIDEN_S / 2
    assert not case.keeper.may_widen


async def _promptly(case: Case, *containers: Container) -> None:
    """Tell a guest its cpusets until it was prompt once: this machine may be busy."""
    for _ in range(50):
        case.take(*containers, insist=True)
        await case.keeper.attempt()
        if case.keeper.may_widen:
            return
    raise TimeoutError("a guest that is never prompt")


async def _widening_s(case: Case) -> float:
    began = time.monotonic()
    await case.keeper.widen(_all_wider(case))
    return time.monotonic() - began


def _all_wider(case: Case) -> Decide:
    def wider(facts: GuestFacts) -> GuestPlan | None:
        look = case.decide(facts)
        assert look is not None
        every = look.map.every
        return replace(look, cpusets=tuple(replace(one, cpus=every) for one in look.cpusets))

    return wider


async def test_nothing_to_widen_where_nothing_was_said(
    new_case: NewCase, guest: PlayedGuest
) -> None:
    """A guest that was told nothing is not asked before a pass."""
    case = new_case(guest)
    case.take()
    assert not case.keeper.may_widen
