"""What kata-pin asks of a runtime by CRI: over the double, and over containerd where it can run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.values import ContainerState
from kata_pin.peers.cri import ContainerUnknown, CriClient
from kata_pin.peers.nri.replies import Cpuset
from tests.support.containerd import PEERS, Release, private_containerd
from tests.support.criserver import CriServer
from tests.support.katalike import KataDirs

pytestmark = pytest.mark.timeout(180)

NOBODY = "0" * 64


@dataclass(frozen=True)
class Runtime:
    """A runtime with three containers; `cpus` returns the cpuset that one has been given."""

    client: CriClient
    created: str
    running: str
    exited: str
    cpus: Callable[[str], str]


@contextmanager
def double(folder: Path) -> Iterator[Runtime]:
    with CriServer(folder / "c.sock") as server:
        server.states = {"created": 0, "running": 1, "exited": 2}
        client = CriClient(str(server.path))
        yield Runtime(client, "created", "running", "exited", lambda name: dict(server.asked)[name])


@contextmanager
def real(folder: Path, release: Release) -> Iterator[Runtime]:
    with private_containerd(folder, KataDirs.below(folder / "n"), release=release) as containerd:
        cri = containerd.cri
        pod = cri.run_pod("p1")
        created, running, exited = (cri.create(pod, name, pod_name="p1") for name in "abc")
        for container in (running, exited):
            cri.start(container)
        cri.stop(exited)

        def cpus(container: str) -> str:
            return str(containerd.spec(container)["linux"]["resources"]["cpu"]["cpus"])

        client = CriClient(str(containerd.cri_socket), deadline_s=20)
        yield Runtime(client, created, running, exited, cpus)


@pytest.fixture(scope="module", params=[pytest.param(None, id="double"), *PEERS])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    folder = Path(tempfile.mkdtemp(prefix="cd"))
    try:
        release: Release | None = request.param
        with real(folder, release) if release else double(folder) as one:
            yield one
    finally:
        shutil.rmtree(folder)


async def test_states(runtime: Runtime) -> None:
    """By id; a container that has exited is still listed."""
    states = await runtime.client.containers()
    assert {name: states[name] for name in (runtime.created, runtime.running, runtime.exited)} == {
        runtime.created: ContainerState.CREATED,
        runtime.running: ContainerState.RUNNING,
        runtime.exited: ContainerState.STOPPED,
    }
    assert NOBODY not in states


@pytest.mark.parametrize("state", ["created", "running", "exited"])
async def test_a_cpuset_is_taken(runtime: Runtime, state: str) -> None:
    """In every state, also of a container that has exited: no error says that it has."""
    container: str = getattr(runtime, state)
    for cpus in ("0-1", "0"):
        await runtime.client.update(container, Cpuset(CpuSet.parse(cpus)))
        assert runtime.cpus(container) == cpus


async def test_a_container_that_is_not_there(runtime: Runtime) -> None:
    """An error of its own, by the status NOT_FOUND."""
    with pytest.raises(ContainerUnknown, match="does not know the container"):
        await runtime.client.update(NOBODY, Cpuset(CpuSet.parse("0")))
