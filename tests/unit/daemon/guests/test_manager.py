"""Which passes have a guest told something, and where its agent is."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.config import Config
from kata_pin.config.guest import Guest
from kata_pin.config.paths import Paths
from kata_pin.config.tree import Mode
from kata_pin.daemon.guests.manager import Guests
from kata_pin.daemon.guests.status import GuestState
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.service.compose import Components, compose
from kata_pin.daemon.store.containers import Registry
from kata_pin.errors import AgentUnavailable, AgentUnknown
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.pass_outcome import Cause, PassOutcome
from kata_pin.model.placement import Action, ActionResult, Outcome, Report
from kata_pin.model.sandbox import Container, GuestTopology, Vmm
from kata_pin.model.settings import PlacementSettings, VcpuMode
from kata_pin.policy.placement.place import place
from tests.support.katalike import ContainerSpec, KataDirs, KataSandbox
from tests.support.playedguest import PlayedGuest
from tests.support.world import exclusive, node, sandbox, shared, vcpus

TWO = GuestTopology(boot=2, maximum=2, sockets=2)


class Case:
    """The guests of one sandbox `pod`, whose agent nobody knows; tasks are counted, not run."""

    def __init__(self, folder: Path, *containers: Container) -> None:
        self.dirs = KataDirs.below(folder)
        config = Config(
            runtime_dir=str(folder), paths=Paths(vc=str(self.dirs.vc), kata=str(self.dirs.kata))
        )
        registry = Registry(str(folder / "registry.db"), boot_id="boot")
        self.parts: Components = compose(config, registry)
        for one in containers:
            registry.adopt(one)
        self.pod = sandbox(*containers, guest=TWO)
        self.started: list[Coroutine[object, object, None]] = []
        self.guests = Guests(
            self.parts.agents,
            registry,
            self.parts.pins,
            self.parts.node,
            cast("Sandboxes", SimpleNamespace(known_vmm=lambda _: self.pod.vmm)),
            self.started.append,
        )

    def configure(self, **settings: Any) -> None:
        """Reload with other settings."""
        self.parts.live.replace(replace(self.parts.live.now, **settings))

    def report(self, *, settled: bool = True) -> Report:
        """Return what a pass found."""
        threads = vcpus(0, 1)
        placement = place(self.pod, threads, node())
        action = Action(threads[0].key, CpuSet([0]), CpuSet([1]), "test")
        results = () if settled else (ActionResult(action, Outcome.REFUSED),)
        return Report("pod", tuple(threads), placement, results=results)

    def passed(
        self, reason: str = "hook:poststart", *, settled: bool = True, since: float = 0.0
    ) -> PassOutcome:
        """Return what observers are told."""
        return PassOutcome(
            "pod", "ns/pod", "ok", self.report(settled=settled), Cause((reason,), since)
        )

    def state(self) -> GuestState:
        """Return how the guest is shown."""
        plan = self.guests.plan(self.pod, self.report())
        assert plan is not None
        return self.guests.view(self.pod.id, plan).state

    def close(self) -> None:
        """Throw the tasks away."""
        for work in self.started:
            work.close()
        self.parts.registry.close()


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with contextlib.closing(Case(tmp_path, exclusive("own", "4"), shared("log", "0"))) as one:
        yield one


def test_a_keeper_is_made_once(case: Case) -> None:
    """The first pass whose pins stand makes it, later ones use it."""
    case.guests.passed(case.passed())
    case.guests.passed(case.passed())
    assert len(case.started) == 1
    assert case.state() is GuestState.PENDING


@contextlib.asynccontextmanager
async def told(case: Case) -> AsyncIterator[PlayedGuest]:
    """Have the guest of a case told what is due."""
    folder = Path(tempfile.mkdtemp(prefix="gs"))
    with PlayedGuest(folder / "agent") as guest:
        KataSandbox(case.dirs, "pod", agent_url=guest.url).write_persist([ContainerSpec("pod")])
        case.guests.passed(case.passed())
        task = asyncio.create_task(case.started.pop())
        await case.guests.settled(["pod"], 5)
        assert case.state() is GuestState.APPLIED
        yield guest
        case.guests.ended(case.passed())
        await asyncio.wait_for(task, 5)
    shutil.rmtree(folder)


async def test_the_guest_cpus_of_a_container(case: Case) -> None:
    """Those that the guest was given and did not refuse; unknown before, and of other sandboxes."""
    assert case.guests.cpus_of("pod", "app") is None
    async with told(case) as guest:
        (container, cpus) = next(iter(guest.cpus.items()))
        assert str(case.guests.cpus_of("pod", container)) == cpus
        assert case.guests.cpus_of("pod", "other") is None
        assert case.guests.cpus_of("elsewhere", container) is None


@pytest.mark.parametrize(
    ("reason", "since", "again"),
    [
        pytest.param("hook:poststart", 0.0, False, id="a pass that is repeated"),
        pytest.param("hook:poststart", 1.0, True, id="another event of Kata"),
        pytest.param("thread born", 1.0, False, id="no event of Kata"),
        pytest.param("audit", 1.0, False, id="drift"),
        pytest.param("pin", 1.0, True, id="an operator"),
    ],
)
async def test_what_is_said_again(case: Case, reason: str, since: float, again: bool) -> None:
    """What Kata or an operator did has it sent again, once an event."""
    async with told(case):
        case.guests.passed(case.passed(reason, since=since))
        assert case.state() is (GuestState.PENDING if again else GuestState.APPLIED)


async def test_a_pass_is_foreseen_where_claims_changed(case: Case) -> None:
    """Only then may pairs move, and only a guest that was prompt once is asked before it."""
    seen = 0

    async def foreseen() -> Report:
        nonlocal seen
        seen += 1
        return case.report()

    registry = case.parts.registry
    async with told(case):
        for number in range(50):  # this machine may be too busy for a prompt answer at first
            registry.adopt(exclusive("own", "4"))
            case.guests.passed(case.passed("pin", since=float(number)))
            await case.guests.settled(["pod"], 5)
            seen = 0
            await case.guests.before("pod", foreseen)
            assert seen == 0
            registry.adopt(exclusive("own", "5"))
            await case.guests.before("pod", foreseen)
            if seen:
                break
        assert seen == 1


def test_a_vcpu_that_is_left_alone_is_shown_where_it_is(case: Case) -> None:
    """Its CPUs in the plan are its affinity, which changes while the placement does not."""
    left = node(settings=PlacementSettings(vcpus=VcpuMode.LEAVE))
    placement = place(case.pod, vcpus(0, 1), left)
    for cpu in (1, 2):
        threads = vcpus(0, 1, on=str(cpu))
        plan = case.guests.plan(case.pod, Report("pod", tuple(threads), placement))
        assert plan is not None
        assert [one.cpus for one in plan.map.links] == [CpuSet([cpu])] * 2


def test_pins_that_do_not_stand_tell_no_guest(case: Case) -> None:
    """A guest is told where its vCPUs are, not where they should be."""
    case.guests.passed(case.passed(settled=False))
    assert case.started == []


def test_nothing_to_say(tmp_path: Path) -> None:
    """A sandbox without a container that has vCPUs of its own needs no keeper."""
    with contextlib.closing(Case(tmp_path, shared("log", "0"))) as case:
        case.guests.passed(case.passed())
        assert (case.started, case.state()) == ([], GuestState.IDLE)
        case.configure(guest=Guest(enabled=False))
        assert case.state() is GuestState.OFF


def test_what_was_said_before_a_restart_makes_a_keeper(tmp_path: Path) -> None:
    """Also where nothing has to be confined now: it may have to be given back."""
    with contextlib.closing(Case(tmp_path, shared("log", "0"))) as case:
        case.parts.registry.run("INSERT INTO guest_cpusets VALUES ('pod', 'log', '1')")
        case.guests.passed(case.passed())
        assert (len(case.started), case.state()) == (1, GuestState.PENDING)


def test_observing_and_switched_off(case: Case) -> None:
    """Neither says anything to a guest that was told nothing."""
    case.configure(mode=Mode.OBSERVE)
    case.guests.passed(case.passed())
    assert case.state() is GuestState.OFF
    case.configure(mode=Mode.ACT, guest=Guest(enabled=False))
    case.guests.passed(case.passed())
    assert case.state() is GuestState.OFF


def test_a_sandbox_that_is_over_is_forgotten(case: Case) -> None:
    """Its keeper ends, and the book has nothing of it."""
    case.guests.passed(case.passed())
    told = case.parts.registry
    told.run("INSERT INTO guest_cpusets VALUES ('pod', 'log', '1')")
    case.guests.ended(case.passed())
    assert told.row("SELECT count(*) FROM guest_cpusets") == (0,)
    asyncio.run(asyncio.wait_for(case.started.pop(), 5))


def test_a_registry_that_cannot_be_read_fails_no_pass(case: Case) -> None:
    """An observer never fails; the guest is left alone."""
    case.parts.registry.close()
    case.guests.passed(case.passed())
    assert case.started == []


async def test_nobody_waits_for_guests_that_have_none(case: Case) -> None:
    """Undo of sandboxes without a keeper returns at once."""
    await asyncio.wait_for(case.guests.settled(["pod", "other"], 60), 1)


async def test_a_pass_is_not_foreseen_for_nothing(case: Case) -> None:
    """Without a guest that was told and prompt, or without another claim, a pass is not doubled."""

    async def foreseen() -> Report:
        raise AssertionError("the pass was foreseen")

    await case.guests.before("pod", foreseen)
    case.guests.passed(case.passed())
    await case.guests.before("pod", foreseen)


def test_address(case: Case) -> None:
    """QEMU's cid first, then Kata's own word; without both nobody knows."""
    vmm: Vmm | None = case.pod.vmm
    assert vmm is not None
    kata = KataSandbox(case.dirs, "pod")
    with pytest.raises(AgentUnknown, match="neither"):
        case.parts.agents.address("pod", vmm)
    for url, expected in (
        ("vsock://77:1024", "vsock://77:1024"),
        ("hvsock:///run/x:1024", "hvsock:///run/x:1024"),
    ):
        kata.agent_url = url
        kata.write_persist([ContainerSpec("pod")])
        assert str(case.parts.agents.address("pod", vmm)) == expected
    kata.agent_url = "tcp://evil"
    kata.write_persist([ContainerSpec("pod")])
    with pytest.raises(AgentUnavailable, match="not usable"):
        case.parts.agents.address("pod", vmm)
    assert str(case.parts.agents.address("pod", replace(vmm, guest_cid=5))) == "vsock://5:1024"
    with pytest.raises(AgentUnavailable, match="not usable"):
        case.parts.agents.address("pod", replace(vmm, guest_cid=0xFFFFFFFF))
