"""What is learnt of a guest, with run times from a written /proc."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Guest
from kata_pin.base.placement import Report
from kata_pin.base.sandbox import GuestTopology, MeasuredGuestCpu, ProcessKey, Vmm
from kata_pin.base.values import Proof
from kata_pin.guest.cpus import GuestPlan, plan_guest
from kata_pin.guest.probe import GuestProbe
from kata_pin.linux.files import HostRoot
from kata_pin.peers.agent.client import AgentClient, parse_address
from tests.support.at_once import place
from tests.support.playedguest import Mood, PlayedGuest
from tests.support.world import cpus, exclusive, node, sandbox, shared, vcpus

POD = sandbox(
    exclusive("own", "4-5"), shared("log", "0-1"), guest=GuestTopology(1, maximum=16, sockets=16)
)
VCPUS = vcpus(0, 15, 14)
TIDS = {0: 1100, 15: 1115, 14: 1114}


@pytest.fixture
def guest() -> Iterator[PlayedGuest]:
    folder = Path(tempfile.mkdtemp(prefix="gm"))
    with PlayedGuest(folder / "agent", online="0-2", apic={0: 0, 1: 15, 2: 14}) as one:
        yield one
    shutil.rmtree(folder)


@pytest.fixture
async def agent(guest: PlayedGuest) -> AsyncIterator[AgentClient]:
    async with AgentClient(parse_address(guest.url), connect_s=2, call_s=2) as client:
        yield client


class Case:
    """A probe over a written /proc, and what it makes of the map."""

    def __init__(self, root: Path, **settings: bool) -> None:
        self.root = root
        self.run()
        self.probe = GuestProbe(HostRoot(str(root)), lambda: Guest(**settings))
        assert POD.vmm is not None
        self.vmm: Vmm = POD.vmm
        self.probe.set_vmm(self.vmm)

    def run(self, waited: float = 0, **seconds: float) -> None:
        """Write how long vCPU threads have run so far, by `v<index>`, and waited to run."""
        for index, tid in TIDS.items():
            folder = self.root / "proc/1000/task" / str(tid)
            folder.mkdir(parents=True, exist_ok=True)
            ran = int(seconds.get(f"v{index}", 0) * 1e9)
            (folder / "schedstat").write_text(f"{ran} {int(waited * 1e9)} 1\n")
            (folder / "stat").write_text(f"{tid} (qemu) S {' '.join(['0'] * 18)} 5 0\n")

    @property
    def look(self) -> GuestPlan:
        """The map with what is known so far."""
        report = Report("pod", tuple(VCPUS), place(POD, VCPUS, node()))
        look = plan_guest(POD, report, node(), self.probe.facts, machine="x86_64")
        assert look is not None
        return look

    def numbers(self) -> dict[int | None, tuple[int | None, str]]:
        """Return guest CPU and state by vCPU."""
        return {one.index: (one.guest_cpu, one.state.value) for one in self.look.map.links}


UNKNOWN = {0: (0, "proven"), 14: (None, "unknown"), 15: (None, "unknown")}


async def test_by_cpuinfo(tmp_path: Path, agent: AgentClient) -> None:
    """Where programs may be run, one look tells every number."""
    case = Case(tmp_path, exec=True)
    assert case.probe.wanted(case.look)
    assert case.numbers() == UNKNOWN
    await case.probe.measure(agent, case.look, "own")
    assert case.numbers() == {0: (0, "measured"), 15: (1, "measured"), 14: (2, "measured")}
    assert not case.probe.wanted(case.look)


async def test_by_busy_times(tmp_path: Path, guest: PlayedGuest, agent: AgentClient) -> None:
    """Without programs: two intervals in which one vCPU was clearly the busiest agree."""
    case = Case(tmp_path)
    for turn in range(4):
        case.run(v0=0.1 * turn, v15=3.0 * turn, v14=1.0 * turn)
        guest.times_ms = [(100.0 * turn, 9e3 * turn), (3e3 * turn, 7.0), (1e3 * turn, 9e3 * turn)]
        before = case.numbers()
        await case.probe.measure(agent, case.look, "own")
        if turn < 2:  # one reading, then one interval: not enough
            assert before == case.numbers() == UNKNOWN
    # by APIC id vCPU 14 would come before vCPU 15: they were numbered as they came
    assert case.numbers() == {0: (0, "proven"), 15: (1, "measured"), 14: (2, "measured")}
    assert "ExecProcess" not in guest.requests


@pytest.mark.parametrize(
    "times",
    [
        pytest.param([(100, 9000), (3000, 10)], id="one of three is offline"),
        pytest.param([(100, 9000), (3000, 10), (0, 0)], id="one stands still"),
        pytest.param([(3000, 10), (3000, 10), (3000, 10)], id="all alike"),
    ],
)
async def test_busy_times_that_tell_nothing(
    tmp_path: Path, guest: PlayedGuest, agent: AgentClient, times: list[tuple[float, float]]
) -> None:
    """Nothing is guessed."""
    case = Case(tmp_path)
    for turn in range(4):
        case.run(v0=0.1 * turn, v15=3.0 * turn, v14=1.0 * turn)
        guest.times_ms = [(busy * turn, idle * turn) for busy, idle in times]
        await case.probe.measure(agent, case.look, "own")
    assert case.numbers() == UNKNOWN


async def test_refusals_are_no_trouble(
    tmp_path: Path, guest: PlayedGuest, agent: AgentClient
) -> None:
    """A policy that refuses metrics and programs leaves things as they are."""
    guest.mood = Mood.DENIES
    for exec_too in (False, True):
        case = Case(tmp_path, exec=exec_too)
        await case.probe.measure(agent, case.look, "own")
        assert case.numbers() == UNKNOWN
        assert await case.probe.proof(agent, "own", cpus("1"), case.look) is None


async def test_frozen_container_is_no_silent_agent(tmp_path: Path, guest: PlayedGuest) -> None:
    """A program that does not end tells nothing, and the agent is asked on."""
    guest.mood = Mood.FROZEN
    case = Case(tmp_path, exec=True)
    async with AgentClient(parse_address(guest.url), connect_s=0.3, call_s=0.3) as agent:
        await case.probe.measure(agent, case.look, "own")
        assert await case.probe.proof(agent, "own", cpus("1"), case.look) is None
    assert guest.requests[-1] == "StatsContainer"
    assert case.numbers() == UNKNOWN


async def test_another_vmm_is_another_guest(tmp_path: Path, agent: AgentClient) -> None:
    """What was measured ends with the VMM; with a thread that is gone it ends too."""
    case = Case(tmp_path, exec=True)
    await case.probe.measure(agent, case.look, "own")
    case.probe.keep_only([VCPUS[1].key], ["own"])
    assert case.numbers() == {**UNKNOWN, 15: (1, "measured")}
    case.probe.set_vmm(case.vmm)
    assert case.numbers()[15] == (1, "measured")
    case.probe.set_vmm(replace(case.vmm, process=ProcessKey(1000, 99)))
    assert case.numbers() == UNKNOWN


async def test_kernel_is_read_once(tmp_path: Path) -> None:
    """Why it is not known is kept too, and asked only of another VMM."""
    case = Case(tmp_path)
    await case.probe.read_kernel()
    assert (case.probe.facts.release, case.probe.kernel_known) == ("", True)
    assert "names none" in case.probe.facts.source


async def test_time_that_fits_and_time_that_does_not(
    tmp_path: Path, guest: PlayedGuest, agent: AgentClient
) -> None:
    """cgroup v2: more CPU time than its vCPU threads ran is a cpuset that is not in force."""
    case = Case(tmp_path)
    verdicts = []
    for used, ran in ((0, 0), (2, 2.5), (2.01, 5), (6, 5.2)):
        guest.used_ns["log"] = int(used * 1e9)
        case.run(v0=ran)
        verdicts.append(await case.probe.proof(agent, "log", cpus("0"), case.look))
    assert verdicts[0] is None  # nothing to compare with yet
    assert verdicts[1] == (Proof.FITS, "")
    assert verdicts[2] is None  # idle
    assert verdicts[3] == (Proof.BROKEN, "it used CPU time outside its guest CPUs")
    assert await case.probe.proof(agent, "log", cpus("1"), case.look) is None  # another set


async def test_stolen_time_is_no_lie(
    tmp_path: Path, guest: PlayedGuest, agent: AgentClient
) -> None:
    """A guest that is not told of stolen time counts the time its vCPU waited for a CPU.

    Seen with Linux 6.12 under TCG on a busy host: 8.0 s used while the vCPU thread ran 3.2 s.
    """
    case = Case(tmp_path)
    verdicts = []
    for used, ran, waited in ((0, 0, 0), (8.04, 3.16, 4.9), (16.2, 6.3, 5.0)):
        guest.used_ns["log"] = int(used * 1e9)
        case.run(v0=ran, waited=waited)
        verdicts.append(await case.probe.proof(agent, "log", cpus("0"), case.look))
    assert [one and one[0] for one in verdicts] == [None, Proof.FITS, Proof.BROKEN]


async def test_time_by_guest_cpu(tmp_path: Path, guest: PlayedGuest, agent: AgentClient) -> None:
    """cgroup v1: the guest CPUs on which the time grew."""
    case = Case(tmp_path)
    verdicts = []
    for per_cpu in ([1, 1, 1], [3, 1, 1], [3, 2, 1]):
        guest.per_cpu_ns["log"] = [int(one * 1e9) for one in per_cpu]
        verdicts.append(await case.probe.proof(agent, "log", cpus("0"), case.look))
    assert [one and one[0] for one in verdicts] == [None, Proof.FITS, Proof.BROKEN]
    guest.per_cpu_ns["log"][0] += int(1e9)  # under the old cpuset, before the new one was set
    assert await case.probe.proof(agent, "log", cpus("1"), case.look) is None


async def test_a_vcpu_that_comes_between_two_looks(
    tmp_path: Path, guest: PlayedGuest, agent: AgentClient
) -> None:
    """Its time is not known for the whole interval, which so says nothing of any of them."""
    case = Case(tmp_path)
    shutil.rmtree(tmp_path / "proc/1000/task" / str(TIDS[14]))
    for turn in range(2):
        guest.times_ms = [(100.0 * turn, 9e3 * turn), (3e3 * turn, 7.0), (1e3 * turn, 9e3 * turn)]
        await case.probe.measure(agent, case.look, "own")
        case.run(v0=0.1, v15=3.0, v14=1.0)
    assert case.numbers() == UNKNOWN


async def test_a_kernel_that_is_read_late_ends_no_measurement(tmp_path: Path) -> None:
    """Guest CPUs that were measured before are still known."""
    case = Case(tmp_path)
    measured = {VCPUS[0].key: MeasuredGuestCpu(1, "test")}
    case.probe.facts = replace(case.probe.facts, measured=measured)
    await case.probe.read_kernel()
    assert case.probe.kernel_known
    assert case.probe.facts.measured == measured
