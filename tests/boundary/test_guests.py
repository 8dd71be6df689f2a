"""Containers' cpusets inside the guest, over the agent's wire.

The agent is played. Its guest has two CPUs; `own` has an exclusive pCPU, `log` shares.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node
from tests.support.playedguest import Mood, PlayedGuest

ASKED = {"connect_ms": 200, "call_ms": 200}
AUDIT = {"affinity_s": 10, "deep_s": 60}
BOTH = {"own": "1", "log": "0"}
WHOLE = {"own": "0-1", "log": "0-1"}


@pytest.fixture
def guest() -> Iterator[PlayedGuest]:
    folder = Path(tempfile.mkdtemp(prefix="kg"))
    with PlayedGuest(folder / "agent") as one:
        yield one
    shutil.rmtree(folder)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path, audit=AUDIT, guest=ASKED) as one:
        yield one


async def _pod(node: Node, guest: PlayedGuest | None, **options: Any) -> Vm:
    """Return a sandbox with both containers, whose pins are set."""
    vm = node.vm("p1", agent_url=guest.url if guest else "", **options)
    for tid in vm.vcpus.values():
        _ran(node, vm, tid, 0)
    await node.create(vm, "own", "4", exclusive=True)
    await node.create(vm, "log", "0-1")
    return vm


def _ran(node: Node, vm: Vm, tid: int, seconds: float, waited: float = 0) -> None:
    text = f"{seconds * 1e9:.0f} {waited * 1e9:.0f} 1"
    node.host.write(f"proc/{vm.pid}/task/{tid}/schedstat", text)


async def _state(node: Node, vm: Vm, state: str, **proofs: str) -> dict[str, Any]:
    """Wait until the guest is shown in a state with these proofs; return what is shown."""
    shown: dict[str, Any] = {}
    for _ in range(1000):
        shown = (await node.shown(vm)).get("guest") or {"state": ""}
        has = {one["name"]: one["proof"] for one in shown.get("containers", ())}
        if shown["state"] == state and has | proofs == has:
            return shown
        await node.pause()
    raise AssertionError(f"the guest is {shown}, not {state} {proofs}")


async def _quiet(node: Node, guest: PlayedGuest) -> None:
    """Wait until the guest is asked nothing any more, and forget what it was told."""
    asked = -1
    while asked != len(guest.requests):
        asked = len(guest.requests)
        for _ in range(30):
            await node.pause()
    guest.said.clear()


async def _again(node: Node, vm: Vm, guest: PlayedGuest) -> set[tuple[str, str]]:
    """Have an event of Kata's, and return what was said until the guest was up to date again."""
    await _quiet(node, guest)
    await node.hook("poststart", "own", vm.pid)
    await node.until(lambda: guest.said, "the guest is told")
    await _state(node, vm, "applied")
    return set(guest.said)


async def test_each_container_on_its_own_vcpus(node: Node, guest: PlayedGuest) -> None:
    """Said once; again after an event of Kata's or an operator's wish, not after a mere pass."""
    vm = await _pod(node, guest)
    shown = await _state(node, vm, "applied", own="none", log="none")
    assert guest.cpus == BOTH
    columns = ("vcpu", "guest_cpu", "state", "container")
    assert [tuple(one[name] for name in columns) for one in shown["vcpus"]] == [
        (0, 0, "proven", ""),
        (1, 1, "proven", "own"),
    ]
    assert "ExecProcess" not in guest.requests
    await _quiet(node, guest)
    tid = node.host.thread(vm.pid, "worker")
    node.kernel.connector.born(tid, vm.pid, vm.pid)
    await node.until(lambda: node.host.affinities[tid] == {0, 1}, "the new thread is pinned")
    assert guest.said == []
    assert await _again(node, vm, guest) == set(BOTH.items())


async def test_a_hotplugged_vcpu(node: Node, guest: PlayedGuest) -> None:
    """Kata resets cpusets after it brought one online: all is said again."""
    vm = await _pod(node, guest)
    await _state(node, vm, "applied")
    await _quiet(node, guest)
    tid = vm.plug()
    _ran(node, vm, tid, 0)
    node.kernel.connector.born(tid, vm.pid, vm.pid)
    await node.until(lambda: len(guest.said) >= 2, "the cpusets are said again")
    assert {name for name, _ in guest.said} == {"own", "log"}


async def test_nothing_is_said_before_it_is_stored(node: Node, guest: PlayedGuest) -> None:
    """A killed daemon could never restore it."""
    guest.mood = Mood.DENIES
    vm = await _pod(node, guest)
    await _state(node, vm, "denied")
    guest.requests.clear()
    guest.mood = Mood.HONEST
    with node.registry_refuses("guest_cpusets"):
        await node.request("reconcile")
        await _state(node, vm, "failed")
        assert guest.said == []
    await node.ask("reconcile")
    await _state(node, vm, "applied")


async def test_undo_after_a_kill(node: Node, guest: PlayedGuest) -> None:
    """The next daemon says it again, and an unpin restores the guest's CPUs, also those to come."""
    vm = await _pod(node, guest)
    await _state(node, vm, "applied")
    await node.kill()
    guest.said.clear()
    await node.start()
    await node.until(lambda: len(guest.said) == 2, "all of it is said again")
    await node.ask("unpin", sandbox=vm.id)
    await node.until(lambda: guest.cpus == WHOLE, "the guest's CPUs are restored")
    node.change(mode="observe")
    await node.ask("reload")
    tid = vm.plug()
    node.kernel.connector.born(tid, vm.pid, vm.pid)
    _ran(node, vm, tid, 0)
    await node.ask("unpin", sandbox=vm.id)
    await node.until(lambda: set(guest.cpus.values()) == {"0-15"}, "all that may ever be")


async def test_what_ended_is_forgotten(node: Node, guest: PlayedGuest) -> None:
    """A container that ended is not said again; of a sandbox that ended nothing is stored."""
    vm = await _pod(node, guest)
    await _state(node, vm, "applied")
    await node.stopped(vm, "log")
    await node.until(lambda: node.rows("guest_cpusets") == [("p1", "own", "1")], "log is forgotten")
    assert await _again(node, vm, guest) == {("own", "1")}
    vm.end()
    await node.clock.move(61)
    await node.until(lambda: node.rows("guest_cpusets") == [], "p1 is forgotten")


async def test_what_is_left_is_the_others(node: Node, guest: PlayedGuest) -> None:
    """The guest CPU of a container that ended; and all of them, once that is switched off."""
    vm = await _pod(node, guest)
    await _state(node, vm, "applied")
    node.change(guest={**ASKED, "enabled": False})
    await node.ask("reload")
    await node.until(lambda: guest.cpus == WHOLE, "the guest's CPUs are restored")
    node.change(guest=ASKED)
    await node.ask("reload")
    await node.until(lambda: guest.cpus == BOTH, "each has its own again")
    await node.stopped(vm, "own")
    await node.until(lambda: guest.cpus["log"] == "0-1", "log has all of them")


@pytest.mark.parametrize(
    ("settings", "cpus", "state"),
    [
        ({}, "", "idle"),
        ({"guest": {"enabled": False}}, "4", "off"),
        ({"mode": "observe"}, "4", "off"),
    ],
)
async def test_nothing_to_say(
    node: Node, guest: PlayedGuest, settings: dict[str, Any], cpus: str, state: str
) -> None:
    """Without a container that has vCPUs of its own, when switched off, and when observing."""
    node.change(**settings)
    await node.ask("reload")
    vm = node.vm("p1", agent_url=guest.url)
    await node.create(vm, "log", "0-1")
    await node.create(vm, "own", cpus, exclusive=bool(cpus))
    await _state(node, vm, state)
    assert guest.said == []


async def test_pins_that_are_not_set_tell_no_guest(node: Node, guest: PlayedGuest) -> None:
    """A guest is told where its vCPUs are, not where they should be."""
    vm = node.vm("p1", agent_url=guest.url)
    node.kernel.refuse[vm.vcpus[1]] = 1
    await node.create(vm, "own", "4", exclusive=True)
    await node.pause()
    assert guest.said == []
    node.kernel.refuse.clear()
    await node.ask("reconcile")
    await node.until(lambda: guest.cpus == {"own": "1"}, "the guest is told")


# ---- guests that do not behave --------------------------------------------------------------


@pytest.mark.parametrize(
    ("mood", "state"),
    [(Mood.HANGS, "unreachable"), (Mood.FLOODS, "unreachable"), (Mood.DENIES, "denied")],
)
async def test_a_guest_that_does_not_behave(
    node: Node, guest: PlayedGuest, mood: Mood, state: str
) -> None:
    """Host pins do not wait; it is tried ever more rarely, and when it behaves it is told."""
    guest.mood = mood
    vm = await _pod(node, guest)
    assert (vm.masks["v1"], vm.masks["v0"]) == ("4", "0-1")
    while (await node.shown(vm))["guest"]["state"] != state:
        await node.clock.move(0.5)
        await node.pause()
    guest.mood = Mood.HONEST
    guest.requests.clear()
    await node.hook("poststart", "own", vm.pid)
    for _ in range(20):
        await node.pause()
    assert guest.requests == []
    await node.clock.move(300)
    await _state(node, vm, "applied")
    assert guest.cpus == BOTH


async def test_an_operator_need_not_wait(node: Node, guest: PlayedGuest) -> None:
    """What was confirmed keeps its age while the guest misses deadlines."""
    vm = await _pod(node, guest)
    await _state(node, vm, "applied")
    guest.mood = Mood.HANGS
    for expected in ("pending", "pending", "unreachable"):
        await node.ask("reconcile")
        shown = await _state(node, vm, expected)
        assert shown["answered_s"] is not None
    guest.mood = Mood.HONEST
    await node.ask("reconcile")
    await _state(node, vm, "applied")


async def test_an_unknown_address(node: Node, guest: PlayedGuest) -> None:
    """Nobody is asked repeatedly where the agent is; Kata's next event may say so."""
    vm = await _pod(node, None)
    assert "unknown" in (await _state(node, vm, "unreachable"))["detail"]
    vm.agent_url = "tcp://elsewhere"
    vm.persist()
    await node.hook("poststart", "own", vm.pid)
    while "not usable" not in (await node.shown(vm))["guest"]["detail"]:
        await node.pause()
    vm.agent_url = guest.url
    vm.persist()
    await node.hook("poststart", "log", vm.pid)
    await node.clock.move(20)
    await _state(node, vm, "applied")


async def test_a_slow_guest_gets_more_time(node: Node, guest: PlayedGuest) -> None:
    """Deadlines double with each miss."""
    guest.mood = Mood.SLOW
    vm = await _pod(node, guest)
    for _ in range(6):
        await node.ask("reconcile")
        if (await node.shown(vm))["guest"]["state"] == "applied":
            break
    await _state(node, vm, "applied")


async def test_one_refused_container_holds_nobody_up(node: Node, guest: PlayedGuest) -> None:
    """A container that the agent does not know is tried again, the others are told."""
    guest.unknown.add("own")
    vm = await _pod(node, guest)
    await _state(node, vm, "failed", own="refused", log="none")
    assert guest.cpus == {"log": "0"}
    guest.unknown.clear()
    await node.clock.move(20)
    await _state(node, vm, "applied")


def _put(vm: Vm, first: int) -> None:
    for name, cpu in (("a", first), ("b", first + 1)):
        vm.containers[name] = {"cpu": {"cpus": str(cpu), "quota": 100_000, "period": 100_000}}
    vm.persist()


async def _dealt(node: Node, vm: Vm, first: int) -> None:
    """Have `a` on the pCPU that `b` had, whose vCPU it takes over, and `b` on the next."""
    stays, moves = sorted(("v1", "v2"), key=lambda name: vm.masks[name] != str(first))
    _put(vm, first)
    await node.placed(vm, **{stays: str(first), moves: str(first + 1)})


async def test_pairs_that_move_between_containers(tmp_path: Path, guest: PlayedGuest) -> None:
    """Both have old and new guest CPUs first. Only a prompt guest is asked, for 50 ms at most."""
    guest.online = "0-2"
    async with Node(tmp_path, guest={"connect_ms": 30_000, "call_ms": 30_000}) as node:
        vm = node.vm("p1", vcpus=3, agent_url=guest.url)
        await node.create(vm, "a", "3", exclusive=True)
        await node.create(vm, "b", "4", exclusive=True)
        before: dict[str, str] = {}
        first = 4
        for first in range(4, 13):  # on a busy machine it is not prompt at once
            await _state(node, vm, "applied")
            before = dict(guest.cpus)
            await _quiet(node, guest)
            await _dealt(node, vm, first)
            await _state(node, vm, "applied")
            if guest.said[:2] == [("a", "1-2"), ("b", "1-2")]:
                break
        assert guest.said[2:] == [("a", before["b"]), ("b", before["a"])]
        await _quiet(node, guest)  # a guest that is being asked is not asked before the pass
        guest.mood = Mood.HANGS
        await _dealt(node, vm, first + 1)
        await node.clock.move(5)  # a pass that took long on a busy machine is followed by a rest
        with node.clock.stopped():
            _put(vm, first + 2)
            await node.clock.turns(lambda: str(first + 3) in vm.masks.values())


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize("asked", ["log", "own"])
async def test_a_container_ends_while_its_guest_is_asked(
    tmp_path: Path, guest: PlayedGuest, refused: bool, asked: str
) -> None:
    """Neither an answer that comes later nor the rest of the session counts or stores it."""
    async with Node(tmp_path, audit=AUDIT, guest={"call_ms": 5000}) as node:
        vm = node.vm("p1", agent_url=guest.url)
        for name in sorted(BOTH, reverse=asked == "own"):
            cpus = {"own": "4", "log": "0-1"}[name]
            await node.create(vm, name, cpus, exclusive=name == "own")
        await _state(node, vm, "applied")
        await _quiet(node, guest)
        guest.mood = Mood.WAITS
        guest.unknown |= {"log"} if refused else set()
        guest.requests.clear()
        await node.hook("poststart", "log", vm.pid)
        await node.until(lambda: "UpdateContainer" in guest.requests, "the guest is asked")
        await node.stopped(vm, "log")
        await node.until(lambda: node.rows("guest_cpusets") == [("p1", "own", "1")], "log is gone")
        guest.mood = Mood.HONEST
        await _state(node, vm, "applied")
        await _audited(node, guest, 1)
        shown = await _state(node, vm, "applied")
        assert [one["name"] for one in shown["containers"]] == ["own"]
        assert node.rows("guest_cpusets") == [("p1", "own", "1")]


async def test_few_guests_are_talked_to_at_once(node: Node, guest: PlayedGuest) -> None:
    """However many guests hang, only some have a connection."""
    guest.mood = Mood.HANGS
    most = 0
    for number in range(14):
        vm = node.vm(f"p{number}", agent_url=guest.url)
        await node.create(vm, f"own{number}", str(number), exclusive=True)
    for _ in range(100):
        most = max(most, guest.connected)
        await node.pause()
    assert 0 < most <= 10  # one that was closed may still be counted by the other side


# ---- what is known of a guest ---------------------------------------------------------------


async def _audited(node: Node, guest: PlayedGuest, containers: int = 2) -> None:
    """Have everything said and checked again."""
    guest.said.clear()
    await node.clock.move(61)
    await node.until(lambda: len(guest.said) >= containers, "an audit of the guest")
    for _ in range(4):
        await node.pause()


async def test_a_cpuset_that_is_not_in_force(node: Node, guest: PlayedGuest) -> None:
    """More CPU time than its vCPU threads ran shows it; the wait for a CPU counts as run time."""
    vm = await _pod(node, guest)
    await _state(node, vm, "applied")
    await _quiet(node, guest)
    for used, ran, waited, proof in (
        *((2.0, 2.5, 0.0, "fits"), (10.0, 5.6, 4.9, "fits")),
        *((10.01, 9.0, 5.0, "fits"), (16.0, 9.2, 5.0, "broken")),
    ):
        guest.used_ns["log"] = int(used * 1e9)
        _ran(node, vm, vm.vcpus[0], ran, waited)
        await _audited(node, guest)
        await _quiet(node, guest)
        await _state(node, vm, "failed" if proof == "broken" else "applied", log=proof)
    detail = {one["name"]: one["detail"] for one in (await node.shown(vm))["guest"]["containers"]}
    assert detail["log"] == "it used CPU time outside its guest CPUs"


async def test_read_back_by_a_program(tmp_path: Path, guest: PlayedGuest) -> None:
    """With guest.exec each vCPU's number is read, and what was set; a lie is found."""
    guest.online, guest.apic = "0-2", {0: 0, 1: 1, 2: 2}
    async with Node(tmp_path, audit=AUDIT, guest={**ASKED, "exec": True}) as node:
        vm = await _pod(node, guest)
        _ran(node, vm, vm.plug(), 0)
        await node.ask("reconcile")
        await _state(node, vm, "applied", own="read", log="read")
        measured, shown = [(number, number, "measured") for number in range(3)], []
        for _ in range(1000):
            vcpus = (await node.shown(vm))["guest"]["vcpus"]
            shown = [(vcpu["vcpu"], vcpu["guest_cpu"], vcpu["state"]) for vcpu in vcpus]
            if shown == measured:
                break
            await node.pause()
        assert shown == measured
        guest.mood = Mood.LIES
        guest.cpus["own"] = "0-2"
        await node.ask("reconcile")
        failed = await _state(node, vm, "failed", own="broken")
        (own,) = [one for one in failed["containers"] if one["name"] == "own"]
        assert own["detail"] == "may run on guest CPUs 0-2"
