"""What audits find out about containers whose end nothing reported."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kata_pin.config.alloc import Alloc
from kata_pin.config.tree import Config
from kata_pin.daemon.allocation import coordinator
from kata_pin.daemon.allocation.coordinator import Coordinator
from kata_pin.daemon.allocation.placement_files import PlacementFiles
from kata_pin.daemon.service.compose import boot_id, compose
from kata_pin.daemon.store.containers import Registry
from kata_pin.host.root import HOST
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.pass_outcome import Cause, PassOutcome
from kata_pin.model.placement import Report
from kata_pin.model.sandbox import Container, ContainerState
from kata_pin.wire.nri.replies import Cpuset
from kata_pin.wire.proto import crirequest_pb2 as pb
from tests.support import world as world_of
from tests.support.allotted import Host, Moves, allocator, request, settings
from tests.support.criserver import CriServer

ALL = Cpuset(CpuSet(range(8)))
CREATED, EXITED = 0, 2


@pytest.fixture
def server() -> Iterator[CriServer]:
    folder = tempfile.mkdtemp(prefix="kp")
    with CriServer(Path(folder) / "c.sock") as one:
        yield one
    shutil.rmtree(folder)


class World:
    """A coordinator with a real registry and allocator, and a runtime that lists containers."""

    def __init__(
        self, registry: Registry, server: CriServer, placements: PlacementFiles | None = None
    ) -> None:
        chosen = settings(cri=str(server.path))
        parts = compose(Config(alloc=chosen), registry)
        self.server, self.registry, self.moves = server, registry, Moves()
        self.allocator = allocator(registry, Host(), self.moves, placements)
        self.ledger = self.allocator.ledger
        self.coordinator = Coordinator(
            *(self.allocator, self.moves, None),
            node=parts.node,
            root=parts.root,
            registry=registry,
        )

    def create(self, name: str, *, kata: bool = True, runs: bool = False, pid: int = 0) -> None:
        """Have a container created with two CPUs of its own."""
        one = request(name, "exclusive", cpus=2, kata=kata)
        self.allocator.admit(one)
        self.ledger.requested(one, f"s-{name}")
        self.ledger.reported(one.container_id, ALL, runs=runs, pid=pid)
        if kata:
            self.registry.record(
                Container(one.container_id, f"s-{name}", name="app", pod_uid=f"uid-{name}"),
                stamp_ns=1,
            )

    def lists(self, **states: int) -> None:
        """Have the runtime list these containers."""
        listed = [pb.Container(id=f"c-{name}", state=state) for name, state in states.items()]
        self.server.listed = pb.ListContainersResponse(containers=listed).SerializeToString()

    async def audit(self) -> None:
        """Audit twice: what is being created now is asked about the second time."""
        for _ in range(2):
            await self.coordinator.ask_runtime()

    def kept(self) -> dict[str, str]:
        """Return where containers with grants have ended."""
        return {
            one.container_id: one.request.ended_in for one in self.allocator.grants.containers()
        }


@pytest.fixture
def world(tmp_path: Path, server: CriServer) -> Iterator[World]:
    registry = Registry(str(tmp_path / "registry.db"), boot_id=boot_id(HOST))
    yield World(registry, server)
    registry.close()


async def test_files_follow_placements(
    tmp_path: Path, server: CriServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guest CPUs once they are known; empty while nothing is decided; gone with the container, but
    not before the runtime has reported what there is."""
    monkeypatch.setattr(coordinator, "GUEST_S", 0.01)
    with closing(Registry(str(tmp_path / "registry.db"), boot_id=boot_id(HOST))) as registry:
        files = PlacementFiles(str(tmp_path), Alloc(placement_file="/run/kata-pin"))
        world = World(registry, server, files)
        known: dict[str, CpuSet] = {}
        work = asyncio.create_task(
            world.coordinator.write_placements(lambda one: known.get(one.container_id))
        )
        world.create("db")
        world.create("web", kata=False)
        db, web = (tmp_path / "placements" / name / "placement" for name in ("c-db", "c-web"))
        assert db.read_text() == "CLASS=exclusive\nCPU_COUNT=2\nGUEST_CPUS=\n"
        own = world.allocator.state.grants["c-web"].exclusive
        assert f"EXCLUSIVE_CPUS={own}\n" in web.read_text()
        known["c-db"] = CpuSet([1, 2])
        await until(lambda: "GUEST_CPUS=1-2\n" in db.read_text())
        world.allocator.stop("switched off")
        await until(lambda: db.read_text() + web.read_text() == "")
        world.allocator.release(["c-db", "c-web"], "it has ended")
        world.ledger.ended("c-web")
        world.ledger.ended("c-db")
        await asyncio.sleep(0.1)
        assert web.exists()
        world.ledger.connected()
        await until(lambda: not web.parent.exists() and not db.parent.exists())
        work.cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_failed_start_is_found(world: World) -> None:
    """It no longer counts as created; its CPUs wait for the next try while it is listed."""
    world.create("db")
    world.lists(db=EXITED)
    await world.coordinator.ask_runtime()
    assert (world.server.lists, world.kept()) == (0, {"c-db": ""})  # it may be in the making
    await world.coordinator.ask_runtime()
    assert world.kept() == {"c-db": "s-db"}
    record = world.registry.container("c-db")
    assert record is not None
    assert (record.state, record.source) == (ContainerState.STOPPED, "cri")
    assert "s-db" in world.moves.requested[-1][0]
    lists = world.server.lists
    await world.audit()
    assert world.server.lists == lists  # nothing is in doubt any more


async def test_who_never_ran_and_is_unknown_is_released(world: World) -> None:
    """There is nothing to come back for."""
    world.create("db", kata=False)
    world.create("web")
    world.lists(web=CREATED)
    await world.audit()
    assert world.kept() == {"c-web": ""}
    record = world.registry.container("c-web")
    assert record is not None
    assert record.state is ContainerState.CREATED


async def test_nothing_is_asked_without_doubt(world: World) -> None:
    """Containers that run need no list: NRI reports their end."""
    world.create("db", runs=True)
    await world.audit()
    assert (world.server.lists, world.kept()) == (0, {"c-db": ""})


async def test_a_runtime_that_does_not_answer_changes_nothing(world: World) -> None:
    """A list that cannot be read, too."""
    world.create("db")
    world.server.listed = b"\xff"
    await world.audit()
    assert world.kept() == {"c-db": ""}


async def test_a_vm_whose_cpuset_was_not_applied(world: World) -> None:
    """Its VM's cgroup allows more: the cpuset is sent again, once for what was seen."""
    world.create("db", runs=True)
    state = world.allocator.now
    (update,) = world.ledger.updates(state)
    assert world.ledger.pending(state) == {}

    def audit(allowed: str) -> dict[str, Cpuset]:
        """Have a pass see the VM's cgroup, and audit; return what is sent then."""
        vcpu = world_of.vcpu(0, cpuset=allowed)
        task = replace(vcpu.task, cgroup="/pods/kata_s-db")
        report = Report("s-db", threads=(vcpu._replace(task=task),))
        world.coordinator.passed(PassOutcome("s-db", "shop/db", "ok", report, Cause()))
        world.coordinator.audit()
        return {one.container_id: one.cpuset for one in world.ledger.updates(state)}

    own = str(update.cpuset.cpus)
    again = {"c-db": update.cpuset}
    assert [audit(one) for one in (own, "0-7", "0-7", own, "0-7")] == [{}, again, {}, {}, again]


async def test_a_process_that_is_gone(world: World) -> None:
    """An event was lost: the CPUs wait for the next instance, as after one that came."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    world.create("db", kata=False, runs=True, pid=done.pid)
    world.create("web", kata=False, runs=True, pid=os.getpid())
    world.create("vm", runs=True, pid=done.pid)
    world.coordinator.audit()
    assert world.kept() == {"c-db": "s-db", "c-web": "", "c-vm": ""}
