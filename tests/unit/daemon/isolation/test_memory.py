"""Moving memory, over a double with the kernel's errors: bounded, polite, and never for ever."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from errno import EACCES, EBUSY, EFAULT, ENOENT, EPERM, ESRCH
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from kata_pin.broker.pages import PagesMoved, PageWindow
from kata_pin.config import Config
from kata_pin.config.tree import Mode
from kata_pin.daemon.isolation import memory as module
from kata_pin.daemon.isolation.memory import AGAIN_S, LONG_S, MIB, NEAR_S, MemoryMover
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.status.cache_metrics import memory_metrics
from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.host import memory as host_memory
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.pass_outcome import RELEASED, Cause, PassOutcome
from kata_pin.model.placement import Claim, Desired, Placement, Provenance, Report, SandboxMask
from kata_pin.model.reports.history import NodeEventKind
from kata_pin.model.reports.sandbox import Memory
from kata_pin.model.sandbox import Container
from kata_pin.model.settings import MemoryMode
from tests.support import world
from tests.support.hosttree import grow
from tests.support.numa_vmm import HUGE, NumaVmm
from tests.support.quietnode import Clock

RATE_MIB = 4
PER_WINDOW = RATE_MIB * MIB // 4096
_SANDBOX = world.sandbox()
assert _SANDBOX.vmm is not None
VMM = _SANDBOX.vmm.process


class World:
    """A mover over one sandbox whose memory is on node 1; `sleeps` are its pauses."""

    def __init__(self, folder: Path, clock: Clock, vmm: NumaVmm) -> None:
        files = {f"proc/{world.VMM_PID}/status": "Name:\tqemu\nMems_allowed_list:\t0-1"}
        files["sys/devices/system/node/has_memory"] = "0-1"
        start = VMM.starttime
        files[f"proc/{world.VMM_PID}/stat"] = f"{VMM.pid} (qemu) S 1{' 0' * 17} {start}{' 0' * 30}"
        grow(folder, files)
        self.folder = folder
        self.clock = clock
        self.vmm = vmm
        self.free(0, 4096)
        self.free(1, 4096)
        config = replace(Config(), memory=MemoryMode.MIGRATE, memory_rate_mib=RATE_MIB)
        self.live = LiveConfig(config)
        self.awaited = self.due = False
        self.containers: tuple[Container, ...] = ()
        self.events = NodeEvents()
        self.sleeps: list[float] = []
        self.between: Callable[[], None] = lambda: None
        """Called in every pause."""
        self.topology = replace(world.smt_host(), distances={0: (10, 20), 1: (20, 10)})
        self.mover = self.restarted()

    def restarted(self) -> MemoryMover:
        node = SimpleNamespace(last=SimpleNamespace(topology=self.topology))
        self.mover = MemoryMover(
            HostRoot(str(self.folder), calls=self.vmm),
            self.live,
            cast("NodeWatch", node),
            cast("Sandboxes", _Passes(self)),
            lambda _: self.containers,
            self.events,
            self._sleep,
        )
        return self.mover

    async def _sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.clock.now += seconds
        self.between()
        await asyncio.sleep(0)

    def free(self, node: int, mib: int) -> None:
        """Have a node of 4 GiB with so much free."""
        text = f"Node {node} MemTotal: {4096 * 1024} kB\nNode {node} MemFree: {mib * 1024} kB"
        huge = "hugepages/hugepages-2048kB/free_hugepages"
        base = f"sys/devices/system/node/node{node}"
        grow(self.folder, {f"{base}/meminfo": text, f"{base}/{huge}": "64"})

    def passed(
        self, cpus: str = "1", *, state: str = "ok", at: str = "", sandbox: str = "pod",
        provenance: Provenance = Provenance.KUBELET, exclusive: bool = True,
    ) -> None:  # fmt: skip
        """Have a pass that pairs the vCPU with a pCPU, on node 0 by default."""
        own = CpuSet.parse(cpus)
        vcpu = world.vcpu(0, on=at or cpus)
        desired = Desired(vcpu.key, own, own, "", paired=True)
        claims = (Claim("c1", own, provenance, ""),)
        mask = SandboxMask(own, exclusive=own if exclusive else CpuSet(), claims=claims)
        report = Report(sandbox, (vcpu,), Placement(sandbox, mask, {vcpu.key: desired}))
        self.mover.passed(PassOutcome(sandbox, "shop/web", state, report, Cause()))

    @property
    def view(self) -> Memory:
        seen = self.mover.seen("pod")
        assert seen is not None
        return seen

    def notes(self) -> str:
        return " ".join(one.text for one in self.mover.notes("pod"))


class _Passes:
    """What the mover asks of the table of sandboxes."""

    def __init__(self, of: World) -> None:
        self._of = of

    def known_vmm(self, sandbox_id: str) -> object:
        return world.sandbox().vmm

    @property
    def any_awaited(self) -> bool:
        return self._of.awaited

    @property
    def any_due(self) -> bool:
        return self._of.due


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(monkeypatch)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def made(tmp_path: Path, clock: Clock) -> World:
    """10 windows of small pages."""
    return World(tmp_path, clock, NumaVmm(10 * PER_WINDOW, 1))


async def test_all_memory_moves_in_windows(made: World) -> None:
    """At most the rate per second, to the vCPUs' node; begin and end are reported."""
    made.passed()
    assert made.view == Memory("waiting", "0", None, 0, "")
    await made.mover.round()
    assert made.vmm.on(1) == 0
    assert made.view == Memory("near", "0", 0, 10 * RATE_MIB * MIB, "")
    assert {one.most for one in made.vmm.windows} == {PER_WINDOW}
    assert made.sleeps == [1.0] * 10
    assert made.events.counts == {NodeEventKind.MEMORY_MOVING: 1, NodeEventKind.MEMORY_MOVED: 1}
    assert made.mover.moved_bytes == 10 * RATE_MIB * MIB
    assert not made.notes()
    values = {one.name: one.samples[0].value for one in memory_metrics(made.mover)}
    assert values == {
        "kata_pin_memory_moved_bytes": 10.0 * RATE_MIB * MIB,
        "kata_pin_memory_remote_bytes": 0,
    }


@pytest.mark.parametrize(
    ("where", "name"),
    [(host_memory, "parse_placed"), (host_memory, "parse_extents"), (module, "plan_moves")],
)
async def test_many_mappings(
    made: World, monkeypatch: pytest.MonkeyPatch, where: ModuleType, name: str
) -> None:
    """The event loop serves others meanwhile; a sandbox that ends then is not moved."""
    loop, real = asyncio.get_running_loop(), getattr(where, name)
    served, gone = threading.Event(), PassOutcome("pod", "", "gone", Report("pod"), Cause())

    def work(*args: object) -> object:
        loop.call_soon_threadsafe(made.mover.ended, gone)
        loop.call_soon_threadsafe(served.set)
        assert served.wait(10), "the event loop waits for this"
        return real(*args)

    monkeypatch.setattr(where, name, work)
    made.passed()
    await made.mover.round()
    assert served.is_set()
    assert (made.vmm.windows, made.events.counts) == ([], {})


async def test_progress_is_shown(made: World) -> None:
    """After each window: what was moved, what is left."""
    seen: list[Memory] = []
    made.between = lambda: seen.append(made.view)
    made.passed()
    await made.mover.round()
    assert {one.state for one in seen} == {"moving"}
    window = RATE_MIB * MIB
    assert [(one.moved_bytes, one.remote_bytes) for one in seen] == [
        ((number + 1) * window, (9 - number) * window) for number in range(10)
    ]


async def test_memory_that_is_near_costs_one_look(made: World, clock: Clock) -> None:
    """It is examined again much later, whatever passes there are."""
    made.vmm.nodes = dict.fromkeys(made.vmm.nodes, 0)
    made.passed()
    await made.mover.round()
    assert (made.view.state, made.vmm.windows, made.events.counts) == ("near", [], {})
    made.vmm.nodes = dict.fromkeys(made.vmm.nodes, 1)
    made.passed()
    await made.mover.round()
    assert not made.vmm.windows
    clock.now += NEAR_S
    await made.mover.round()
    assert made.vmm.on(1) == 0


@pytest.mark.parametrize("errno", [EBUSY, EFAULT, ENOENT, EACCES])
async def test_some_pages_refuse(made: World, clock: Clock, errno: int) -> None:
    """The others move; what is left has its reason, and is not tried for ever."""
    made.vmm.refusals = {made.vmm.address(one * 8): errno for one in range(1280)}
    made.passed()
    await made.mover.round()
    assert made.vmm.on(1) == 1280
    assert made.view.state == "stopped"
    assert "5 MiB cannot be moved: " in made.view.problem
    assert made.view.problem in made.notes()
    assert made.events.counts[NodeEventKind.MEMORY_STAYS] == 1
    calls = made.vmm.moves
    for _ in range(5):
        made.passed()
        clock.now += AGAIN_S
        await made.mover.round()
    assert made.vmm.moves == calls
    clock.now += LONG_S
    await made.mover.round()
    assert made.vmm.moves > calls


async def test_memory_that_is_pinned_for_a_device(made: World) -> None:
    """Nothing moves: three windows are tried, not ten."""
    made.vmm.pinned = set(made.vmm.nodes)
    made.passed()
    await made.mover.round()
    assert made.vmm.on(0) == 0
    assert len(made.vmm.windows) == 3
    assert "40 MiB cannot be moved: busy, or pinned for a device (VFIO)" in made.view.problem


async def test_a_tenth_that_is_pinned(made: World) -> None:
    """A pinned page ends the kernel's call; what is after it moves with the next."""
    made.vmm.pinned = {made.vmm.address(one) for one in range(PER_WINDOW)}
    made.passed()
    await made.mover.round()
    assert made.vmm.on(1) == PER_WINDOW
    assert "4 MiB cannot be moved" in made.view.problem


async def test_huge_pages(tmp_path: Path, clock: Clock) -> None:
    """One page of 2 MiB counts as that, and only free huge pages are taken."""
    vmm = NumaVmm(8, 1, size=HUGE)
    vmm.file, vmm.shared = "/anon_hugepage", True
    made = World(tmp_path, clock, vmm)
    made.passed()
    await made.mover.round()
    assert made.view == Memory("near", "0", 0, 16 * MIB, "")
    assert [one.most for one in vmm.windows] == [2] * 4
    assert all(one.shared for one in vmm.windows)
    assert made.sleeps == [1.0] * 4


async def test_memory_gets_short(made: World, clock: Clock) -> None:
    """A part of the node stays free; later it goes on."""
    made.free(0, 4096 * 5 // 100 + 6)
    made.between = lambda: made.free(0, 4096 * 5 // 100 + 6 - 4 * len(made.vmm.windows))
    made.passed()
    await made.mover.round()
    assert made.vmm.on(0) * 4096 // MIB == 5
    assert "NUMA node 0 has no more free memory" in made.view.problem
    made.free(0, 4096)
    made.between = lambda: None
    clock.now += AGAIN_S
    await made.mover.round()
    assert made.view.problem == ""
    assert made.vmm.on(1) == 0


async def test_vcpus_that_move_meanwhile(made: World) -> None:
    """The move ends at once, and the new nodes are the aim of the next."""
    made.between = lambda: made.passed("5") if len(made.vmm.windows) == 3 else None
    made.passed()
    await made.mover.round()
    assert made.vmm.on(0) == 3 * PER_WINDOW
    assert (made.view.state, made.view.nodes) == ("waiting", "1")
    made.between = lambda: None
    await made.mover.round()
    assert made.vmm.on(0) == 0


@pytest.mark.parametrize("how", ["ended", "released", "observe", "report", "unpinned"])
async def test_what_ends_a_move(made: World, how: str) -> None:
    """No window after the sandbox, the setting or the pins are gone."""

    def end() -> None:
        if len(made.vmm.windows) != 2:
            return
        now = made.live.now
        match how:
            case "ended":
                made.mover.ended(PassOutcome("pod", "", "gone", Report("pod"), Cause()))
            case "released":
                made.passed(state=RELEASED)
            case "observe":
                made.live.replace(replace(now, mode=Mode.OBSERVE))
            case "report":
                made.live.replace(replace(now, memory=MemoryMode.REPORT))
                made.passed()
            case "unpinned":
                made.passed(exclusive=False)

    made.between = end
    made.passed()
    await made.mover.round()
    assert len(made.vmm.windows) == 2
    if how in {"observe", "report"}:
        assert not list(memory_metrics(made.mover))


async def test_a_vmm_that_moves_its_vcpus_itself(made: World) -> None:
    """That is drift, which is repaired: it neither ends a move nor begins another."""
    made.between = lambda: made.passed(at="5")
    made.passed()
    await made.mover.round()
    assert made.view.state == "near"
    assert made.events.counts[NodeEventKind.MEMORY_MOVING] == 1
    made.passed()
    assert made.view.state == "near"


def test_only_sandboxes_with_placed_vcpus(made: World) -> None:
    """Not placed yet, not exclusive, or a host with a single node."""
    made.passed(at="5")
    assert made.view == Memory("waiting", "", None, 0, "")
    made.passed(exclusive=False)
    assert made.view.nodes == ""
    made.topology = replace(made.topology, distances={0: (10,)})
    made.restarted()
    made.passed()
    assert made.view.nodes == ""
    made.live.replace(replace(made.live.now, memory=MemoryMode.REPORT))
    assert made.mover.seen("pod") is None


async def test_hooks_and_passes_go_first(made: World) -> None:
    """Nothing moves while a hook waits; passes alone are waited for a while."""
    waited: list[int] = []

    def look() -> None:
        waited.append(len(made.vmm.windows))
        if len(waited) == 200:
            made.awaited = False

    made.awaited = made.due = True
    made.between = look
    made.passed()
    await made.mover.round()
    assert waited[:200] == [0] * 200
    assert made.vmm.on(1) == 0, "passes without end do not stop it"
    rests = [sum(1 for _ in group) for _, group in itertools.groupby(waited[200:])]
    assert min(rests[1:-1]) >= module.PASSES_S / module.LOOK_S


async def test_a_cpuset_that_forbids_the_node(made: World) -> None:
    """Nothing is tried; the reason says what to change."""
    status = made.folder / "proc" / str(world.VMM_PID) / "status"
    status.write_text("Mems_allowed_list:\t1\n")
    made.passed()
    await made.mover.round()
    assert not made.vmm.windows
    assert "cpuset.mems allows NUMA node 1 alone" in made.notes()
    assert made.events.counts == {NodeEventKind.MEMORY_STAYS: 1}


async def test_what_the_kubelet_decided_stays(made: World) -> None:
    """Memory that its memory manager gave is not taken elsewhere; our allocator's own follows."""
    made.containers = (replace(world.exclusive("c1", "1"), mems="1"),)
    made.passed()
    await made.mover.round()
    assert not made.vmm.windows
    assert "given memory of NUMA node 1" in made.view.problem
    made.passed(provenance=Provenance.ALLOCATOR)
    await made.mover.round()
    assert made.view.state == "near"
    made.containers = (replace(world.exclusive("c1", "1"), mems="no list"),)
    made.passed(provenance=Provenance.KUBELET)
    assert made.view.nodes == "0", "what makes no sense confines nothing"


async def test_what_the_vmm_bound_stays(made: World) -> None:
    """Its own policy is named with the remedy."""
    made.vmm.policy = "bind:1"
    made.passed()
    await made.mover.round()
    assert not made.vmm.windows
    assert "(policy bind:1): see host-nodes" in made.view.problem
    assert made.view.remote_bytes == 40 * MIB


@pytest.mark.parametrize(
    ("errno", "words"), [(EPERM, "CAP_SYS_NICE"), (EACCES, "not verified"), (ESRCH, "")]
)
async def test_a_call_that_is_refused(
    made: World, caplog: pytest.LogCaptureFixture, errno: int, words: str
) -> None:
    """It is said once, and tried again later; a process that ended is the next pass's business."""

    async def refuse(window: PageWindow, deadline_s: float) -> PagesMoved:
        await asyncio.sleep(0)
        if errno == ESRCH:
            (made.folder / "proc" / str(VMM.pid) / "stat").unlink()
        raise OSError(errno, "refused")

    made.vmm.move_pages = refuse  # type: ignore[method-assign]
    made.passed()
    with caplog.at_level(logging.WARNING):
        await made.mover.round()
    assert words in made.view.problem
    assert bool(caplog.records) == bool(words)


async def test_a_move_that_does_not_end(made: World, clock: Clock) -> None:
    """One deadline, then the sandbox is left for hours."""
    made.vmm.hangs = True
    made.passed()
    await made.mover.round()
    assert "does not answer in time" in made.view.problem
    clock.now += LONG_S - 1
    await made.mover.round()
    assert len(made.vmm.windows) == 1


async def test_an_error_of_ours_is_a_barrier(made: World) -> None:
    """Another sandbox is moved all the same, and the daemon goes on."""
    calls = itertools.count()
    maps = made.vmm.numa_maps

    def broken() -> str:
        if next(calls) == 0:
            raise RuntimeError("a defect")
        return maps()

    made.vmm.numa_maps = broken  # type: ignore[method-assign]
    made.passed()
    made.passed(sandbox="other")
    await made.mover.round()
    assert made.view.problem == "a defect"
    other = made.mover.seen("other")
    assert other is not None
    assert other.state == "near"


async def test_a_new_daemon_does_the_rest(made: World) -> None:
    """Nothing is recorded: what was moved is where it is."""

    def die() -> None:
        if len(made.vmm.windows) == 4:
            raise asyncio.CancelledError

    made.between = die
    made.passed()
    with pytest.raises(asyncio.CancelledError):
        await made.mover.round()
    assert made.vmm.on(0) == 4 * PER_WINDOW
    made.between = lambda: None
    made.restarted()
    made.passed()
    await made.mover.round()
    assert made.vmm.on(1) == 0
    assert made.view.moved_bytes == 6 * RATE_MIB * MIB


async def test_it_runs_when_a_pass_says_so(made: World) -> None:
    """The task wakes up without a clock."""
    running = asyncio.create_task(made.mover.run())
    await asyncio.sleep(0)
    made.passed()
    while made.view.state != "near":
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
