"""Switching the allocator off: which containers get all CPUs, and what is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.config.alloc import NO_POLICY
from kata_pin.config.tree import Config, Mode
from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.coordinator import Coordinator
from kata_pin.daemon.allocation.ledger import Ledger
from kata_pin.daemon.allocation.nri_decider import NriDecider, Recorder, nri_decider
from kata_pin.daemon.allocation.restore import kept_cpusets, unconfined
from kata_pin.daemon.service.compose import compose
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.grants import AllocStore
from kata_pin.model.adjustment import Limits
from kata_pin.model.alloc import AllocState, ContainerRequest
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node import KubeletState
from kata_pin.model.reports.pools import KeptCpuset
from kata_pin.model.sandbox import Container
from kata_pin.sources.nri import NriPlugin
from kata_pin.wire.nri.messages import Event, EventKind, Pod, PodContainer, Snapshot
from kata_pin.wire.nri.replies import Answer, Cpuset
from kata_pin.wire.oci import CpuResources
from tests.support.allotted import Host, Moves, allocator, looking, request, settings
from tests.support.world import cpus, flat, without

ALL = "0-7"
WEB = request("web", kata=False)
DB = request("db", "exclusive", cpus=2)
FREE = request("free", "exclusive", cpus=1, quota=False)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    one = Registry(str(tmp_path / "registry.db"), boot_id="b")
    yield one
    one.close()


@pytest.fixture
def host() -> Host:
    return Host()


def decided(registry: Registry, host: Host, *requests: ContainerRequest) -> AllocState:
    """Have a daemon give these containers their CPUs, and return what it stored."""
    one = allocator(registry, host)
    for asked in requests or (WEB, DB):
        one.admit(asked)
    return one.state


def next_daemon(registry: Registry, host: Host, how: str) -> Allocator:
    """Return the allocator of a daemon that was started with it switched off."""
    if how == "observe":
        host.config = Config(mode=Mode.OBSERVE)
        return allocator(registry, host)
    return allocator(registry, host, policy=NO_POLICY)


def decider(one: Allocator, registry: Registry) -> NriDecider:
    recorder = SimpleNamespace(kata_among=lambda _: frozenset(), is_kata=lambda _: False)
    return NriDecider(cast("Recorder", recorder), one, registry, Moves())


def snapshot(**there: str) -> Snapshot:
    """Return what a runtime reports: pods of one container each, with their cpusets."""
    return Snapshot(
        tuple(Pod(name, name=name, uid=f"uid-{name}", pid=1) for name in there),
        tuple(
            PodContainer(f"c-{name}", name, name="app", cpu=CpuResources(cpus=has))
            for name, has in there.items()
        ),
    )


def adopted(registry: Registry, host: Host, how: str, **there: str) -> dict[str, str]:
    """Have everything reported to the next daemon; return what it changes."""
    one = next_daemon(registry, host, how)
    answers = decider(one, registry)
    updates = {x.container_id: str(x.cpuset.cpus) for x in answers.adopt(snapshot(**there))}
    assert (one.state, AllocStore(registry).read()) == (AllocState(), None)
    assert one.ledger.pending(one.effective) == {}
    pod = Pod("new", name="new", uid="u", pid=1)
    created = Event(EventKind.CREATE_CONTAINER, pod, PodContainer("c-new", "new"))
    assert answers.decide(created, 1) == Answer()
    return updates


@pytest.mark.parametrize("how", ["none", "observe"])
def test_the_first_synchronize_gives_everything_back(
    registry: Registry, host: Host, how: str
) -> None:
    """A container with the stored cpuset gets all CPUs, once; then the state is empty."""
    state = decided(registry, host)
    own, pool = str(state.exclusive), str(state.shared)
    assert adopted(registry, host, how, web=pool, db=own) == {"c-web": ALL, "c-db": ALL}
    assert adopted(registry, host, how, web=pool, db=own) == {}


@pytest.mark.parametrize("how", ["none", "observe"])
def test_what_is_not_ours_stays(registry: Registry, host: Host, how: str) -> None:
    """Another cpuset than was stored, none at all, a container that we do not know."""
    state = decided(registry, host)
    assert adopted(registry, host, how, web="1", db="", other=str(state.shared)) == {}


def test_a_kata_container_without_a_quota(registry: Registry, host: Host) -> None:
    """It never got a cpuset from us, so it gets none now: Kata would size its VM by it."""
    state = decided(registry, host, FREE)
    assert adopted(registry, host, "none", free=str(state.exclusive)) == {}


def test_what_ended_meanwhile_changes_nothing_for_others(registry: Registry, host: Host) -> None:
    """Grants stay until all CPUs are restored, whichever containers have ended before."""
    state = decided(registry, host)
    one = next_daemon(registry, host, "observe")
    one.release(["c-db"], "test")
    assert one.state.grants["c-web"] == state.grants["c-web"]
    assert adopted(registry, host, "observe", web=str(state.shared)) == {"c-web": ALL}


def test_the_kubelet_takes_over(registry: Registry, host: Host) -> None:
    """Under its static policy nothing is restored: it may have set the same cpuset."""
    state = decided(registry, host)
    host.kubelet = KubeletState("static", cpus("0-1"))
    assert adopted(registry, host, "none", web=str(state.shared)) == {}


LIMITS = Limits(shares=512, quota_us=50_000, period_us=50_000, memory=1 << 30)
OWN = Limits(shares=2048, quota_us=200_000)
"""What a policy of another package set, and what the container had by its own spec."""

REPORTED = CpuResources(shares=512, quota_us=50_000, period_us=50_000)


def limited(registry: Registry, host: Host) -> AllocState:
    """Have a daemon store limits beside the CPUs of a container."""
    state = decided(registry, host, replace(WEB, limits=OWN), DB)
    grant = replace(state.grants["c-web"], limits=LIMITS)
    AllocStore(registry).write(replace(state, grants={**state.grants, "c-web": grant}))
    return state


def restored(registry: Registry, host: Host, cpu: CpuResources, memory: int) -> list[Cpuset]:
    """Have a container reported to the next daemon, which is off; return what it gets."""
    seen = snapshot(web=cpu.cpus)
    (container,) = seen.containers
    seen = replace(seen, containers=(replace(container, cpu=cpu, memory=memory),))
    answers = decider(next_daemon(registry, host, "none"), registry)
    return [one.cpuset for one in answers.adopt(seen)]


def test_limits_are_given_back(registry: Registry, host: Host) -> None:
    """The container's own ones; what it did not have is lifted."""
    pool = str(limited(registry, host).shared)
    cpu = replace(REPORTED, cpus=pool)
    (found,) = restored(registry, host, cpu, 1 << 30)
    first = Limits(shares=2048, quota_us=200_000, period_us=100_000, memory=-1)
    assert found == Cpuset(cpus(ALL), limits=first)
    assert restored(registry, host, cpu, 1 << 30) == [], "once"


def test_limits_of_others_stay(registry: Registry, host: Host) -> None:
    """Something else changed one meanwhile, or the cpuset: each is judged for itself."""
    pool = str(limited(registry, host).shared)
    (found,) = restored(registry, host, replace(REPORTED, cpus=pool), 2 << 30)
    assert found == Cpuset(cpus(ALL))
    limited(registry, host)
    (found,) = restored(registry, host, replace(REPORTED, cpus="1"), 1 << 30)
    assert found == Cpuset(limits=Limits(2048, 200_000, 100_000, -1))


def test_until_nri_is_there_it_is_said(registry: Registry, host: Host) -> None:
    """A node that was switched off shows that something is left, until nothing is."""
    assert next_daemon(registry, host, "none").notes == ()
    decided(registry, host)
    one = next_daemon(registry, host, "none")
    assert [note.code for note in one.notes] == ["alloc-left-behind"]
    one.grants.forget()
    assert one.notes == ()


def test_only_what_is_left_needs_a_decider(registry: Registry) -> None:
    """With alloc.policy none NRI is observed, unless an earlier daemon has decided."""
    off = Config()
    recorder = cast("Recorder", None)
    assert nri_decider(recorder, compose(off, registry).allocator, registry, Moves()) is None
    decided(registry, Host())
    assert nri_decider(recorder, compose(off, registry).allocator, registry, Moves()) is not None


def test_all_cpus() -> None:
    """What is online and not isolated, and what we granted; all memory nodes if we set some."""
    host = replace(flat(8), isolated=cpus("6-7"))
    assert unconfined(AllocState(), host) == Cpuset(cpus("0-5"))
    state = AllocState(cpus("2-6"), reserved=cpus("2"), housekeeping=cpus("1"))
    assert unconfined(state, host).cpus == cpus("0-6")
    gone = without(flat(8), "3")
    assert unconfined(state, gone).cpus == cpus("0-2,4-7")
    assert unconfined(state, host, mems=True).mems == CpuSet(host.nodes)


def test_a_last_cpuset_is_sent_once() -> None:
    """It waits for the next answer, and whatever a container has then stays."""
    ledger, everything, none = Ledger(), Cpuset(cpus(ALL)), AllocState()
    ledger.reported("c-web", Cpuset(cpus("1")))
    ledger.restore("c-web", everything)
    assert ledger.is_restoring("c-web")
    ledger.reported("c-web", Cpuset(cpus("1")), pid=7)
    assert ledger.pending(none) == {"c-web": everything}
    assert [one.cpuset for one in ledger.updates(none)] == [everything]
    assert not ledger.is_restoring("c-web")
    ledger.reported("c-web", Cpuset(cpus("2")))
    assert ledger.pending(none) == {}


def test_a_last_cpuset_that_is_overtaken() -> None:
    """By another program's, by the container's end, or by a new connection."""
    for overtake in ("reported", "ended", "disconnected"):
        ledger = Ledger()
        ledger.reported("c-web", Cpuset(cpus("1")))
        ledger.restore("c-web", Cpuset(cpus(ALL)))
        arguments: dict[str, tuple[Any, ...]] = {"reported": ("c-web", Cpuset(cpus("2")))}
        getattr(ledger, overtake)(*arguments.get(overtake, ("c-web",) * (overtake == "ended")))
        assert ledger.pending(AllocState()) == {}
        assert not ledger.is_restoring("c-web")


async def test_a_last_cpuset_that_is_pushed() -> None:
    """What was sent between two answers is not sent again."""
    ledger, everything = Ledger(), Cpuset(cpus(ALL))
    ledger.reported("c-web", Cpuset(cpus("1")))
    ledger.restore("c-web", everything)
    with ledger.pushing("c-web", everything):
        assert ledger.updates(AllocState()) == ()
    assert not ledger.is_restoring("c-web")


class Plugin:
    """A runtime that accepts updates at any time, if it does not refuse."""

    def __init__(self, problem: str = "") -> None:
        self.updates_problem = problem
        self.sent: dict[str, str] = {}

    async def update(self, container_id: str, cpuset: Cpuset) -> None:
        self.sent[container_id] = str(cpuset.cpus)


async def uninstalled(
    registry: Registry, plugin: Plugin
) -> tuple[Allocator, tuple[KeptCpuset, ...]]:
    """Have a daemon decide, and then restore all CPUs; return what waits."""
    parts = compose(Config(alloc=settings()), registry)
    passes = Moves()
    one = allocator(registry, Host(), passes)
    coordinator = Coordinator(
        one,
        passes,
        cast("NriPlugin", plugin),
        node=parts.node,
        root=parts.root,
        registry=registry,
    )
    coordinator.catch_up()
    for asked in (WEB, DB):
        one.admit(asked)
    task = asyncio.create_task(coordinator.push())
    await one.ledger.tried.wait()
    ledger = one.ledger
    ledger.reported("c-web", Cpuset(cpus("0-3")))  # not the newest: that is pending
    ledger.reported("c-db", Cpuset(one.state.exclusive))
    try:
        return one, await coordinator.restore()
    finally:
        task.cancel()


async def test_uninstall_pushes(registry: Registry) -> None:
    """If cpusets can be pushed, every container has all CPUs when it returns."""
    plugin = Plugin()
    one, waiting = await uninstalled(registry, plugin)
    assert plugin.sent == {"c-web": ALL, "c-db": ALL}
    assert waiting == ()
    assert "all CPUs were restored" in one.suspended
    assert AllocStore(registry).read() is None


async def test_uninstall_says_what_waits(registry: Registry) -> None:
    """If not, the containers that keep cpusets are returned; an answer still carries them."""
    one, waiting = await uninstalled(registry, Plugin("too old"))
    assert [(kept.pod, kept.name) for kept in waiting] == [
        ("shop/web", "app"),
        ("shop/db", "app"),
    ]
    assert AllocStore(registry).read() is not None  # for the next daemon to give back
    updates = one.ledger.updates(AllocState())
    assert {x.container_id: str(x.cpuset.cpus) for x in updates} == {
        "c-web": ALL,
        "c-db": ALL,
    }


def test_without_a_daemon_all_of_it_waits(registry: Registry, host: Host) -> None:
    """A command cannot reach the runtime: it lists the containers with a cpuset of ours.

    A Kata container that no runtime was told about, without NRI, has none.
    """
    bare = request("bare", "exclusive", cpus=1)
    state = decided(registry, host, WEB, DB, FREE, bare)
    own = state.grants["c-db"].exclusive
    registry.adopt(Container("c-db", "s-db", cpus=own))
    registry.adopt(Container("c-bare", "s-bare"))
    waiting = kept_cpusets(looking(registry, host), registry)
    assert [(one.id, one.cpus) for one in waiting] == [
        ("c-web", str(state.shared)),
        ("c-db", str(own)),
    ]


def test_only_other_runtimes_containers_prove_nri(registry: Registry, host: Host) -> None:
    """If no runtime was ever connected, nothing is reported as left."""
    decided(registry, host, DB)
    assert next_daemon(registry, host, "none").notes == ()
