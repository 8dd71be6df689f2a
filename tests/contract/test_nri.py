"""What a runtime reports by NRI over a container's life: the double's order is containerd's."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kata_pin.peers.nri.messages import Event, EventKind, Snapshot
from kata_pin.peers.nri.plugin import NriPlugin
from tests.support.containerd import PEERS, Containerd, Release, private_containerd
from tests.support.katalike import KataDirs
from tests.support.nriruntime import Runtime, container, pod

pytestmark = pytest.mark.timeout(180)


@dataclass
class Told:
    """A listener that keeps what it is told."""

    events: list[Event] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        self.snapshots.append(snapshot)

    def receive(self, event: Event, stamp_ns: int) -> int:
        self.events.append(event)
        return 0

    async def placed(self, event: Event, ticket: int) -> None:
        """Return at once."""


@asynccontextmanager
async def plugin(told: Told, path: Path) -> AsyncIterator[NriPlugin]:
    """Run our plugin for the block, from when the runtime has told it everything."""
    one = NriPlugin(told, socket_path=str(path), name="kata-pin", index="95", wanted=True)
    task = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def of_the_double(folder: Path, told: Told) -> str:
    """Play a container's life; return the runtime's name."""
    async with Runtime(folder / "nri.sock") as runtime, plugin(told, runtime.path) as ours:
        peer = await runtime.plugin()
        await peer.registered()
        await peer.configure()
        await peer.synchronize([pod()], [container(cpus="0")])
        await until(lambda: told.snapshots)
        for kind, cpus in ORDER:
            await peer.event(EventKind[kind], pod(), container("c2", cpus=cpus))
        await until(lambda: len(told.events) == len(ORDER))
        return ours.runtime


async def of_containerd(containerd: Containerd, told: Told) -> str:
    """Let a real runtime live it."""
    cri = containerd.cri
    call: Any = asyncio.to_thread
    its_pod = await call(cri.run_pod, "p1")
    await call(cri.create, its_pod, "c1", pod_name="p1", cpuset_cpus="0")
    async with plugin(told, containerd.nri_socket) as ours:
        await until(lambda: told.snapshots)
        second = await call(cri.create, its_pod, "c2", pod_name="p1", cpuset_cpus="0")
        await call(cri.start, second)
        await call(cri.update, second, cpuset_cpus="0-1")
        await call(cri.stop, second)
        await call(cri.remove, second)
        await until(lambda: told.events and told.events[-1].kind.name == ORDER[-1][0])
        return ours.runtime


ORDER = [
    ("START_CONTAINER", "0"),
    ("POST_START_CONTAINER", "0"),
    ("POST_UPDATE_CONTAINER", "0-1"),
    ("STOP_CONTAINER", "0-1"),
    ("REMOVE_CONTAINER", "0-1"),
]
"""What an observer is told, with the cpuset that it finds in each event."""


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="cd"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=[pytest.param(None, id="double"), *PEERS])
def containerd(request: pytest.FixtureRequest, folder: Path) -> Iterator[Containerd | None]:
    """A real runtime, or None for the double."""
    release: Release | None = request.param
    if release is None:
        yield None
        return
    with private_containerd(folder, KataDirs.below(folder / "n"), release=release) as one:
        yield one


async def test_a_life(folder: Path, containerd: Containerd | None) -> None:
    """What there was before is in the snapshot; then each step, in its order."""
    told = Told()
    if containerd is None:
        runtime = await of_the_double(folder, told)
    else:
        runtime = await of_containerd(containerd, told)
    assert "containerd" in runtime
    (snapshot,) = told.snapshots
    assert [(one.name, one.namespace) for one in snapshot.pods] == [("p1", "shop")]
    assert [(one.name, one.cpu.cpus) for one in snapshot.containers] == [("c1", "0")]
    seen = [(one.kind.name, one.container.cpu.cpus) for one in told.events if one.container]
    assert seen == ORDER
