"""NRI on a full node: how long a runtime waits for Synchronize and for each event.

The whole daemon in this process, over a node made of files: 256 pCPUs, 50 sandboxes with 500
containers, 600 interrupts, `quiet: full`. The runtime is one played here, and each real containerd
that is on this machine (tests/support/containerd.py): there pods are runc's, and their VMs files,
as all VMs here. A real runtime creates containers and removes them; it starts one of ten where
nobody decides their CPUs, which this machine need not have.

A relay between the two, in a thread of its own, takes the times: from a call's last byte to the
answer's. It shares Python with the daemon, so one time may be 5 ms too short or too long.
A connection that either side closes by itself fails the part.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from errno import EPERM
from pathlib import Path
from typing import Any, Final, Self

from kata_pin.peers import ttrpc
from kata_pin.peers.nri.messages import EventKind
from kata_pin.peers.ttrpc import FrameDecoder, MuxDecoder
from tests.bench.figures import MS, BenchError, Row, Samples
from tests.bench.node import BenchNode
from tests.boundary.node import Node
from tests.support.containerd import (
    BUILT,
    DEBIANS,
    Containerd,
    Release,
    private_containerd,
    why_not,
)
from tests.support.irqtree import Line
from tests.support.nriruntime import Peer, Runtime, container, pb, pod
from tests.support.worktree import WorkTree

CPUS, INTERRUPTS, MOVABLE = 256, 600, 240
ALL: Final = f"0-{CPUS - 1}"
FIRST: Final = 100
"""The number of the first interrupt."""

PODS, CONTAINERS = 50, 10
SHARED: Final = "0-15"
"""pCPUs of all containers but the first of each pod, which has four of its own."""

SYNCHRONIZE_MS, EVENT_MS = 500.0, 50.0
CREATIONS: Final = 50
"""How many containers are created in each round; 2,000 in a run of 40."""

STARTED: Final = 10
"""Of how many that a real runtime creates it starts one."""

PERIOD_US: Final = 100_000


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the p99 of Synchronize and of events, by runtime, with and without an allocator."""
    missing = why_not()
    if missing:
        print(f"sync: without a real containerd: {missing}", file=sys.stderr)
    real = [] if missing else [DEBIANS, *([BUILT] if Path(BUILT.programs).is_dir() else [])]
    for policy in ("none", "topology"):
        for release in (None, *real):
            with tempfile.TemporaryDirectory(prefix="kpn-") as folder:
                yield from asyncio.run(_measured(Path(folder), node, policy, release, rounds))


async def _measured(
    folder: Path, bench: BenchNode, policy: str, release: Release | None, rounds: int
) -> list[Row]:
    name = "double" if release is None else f"containerd {release.name}"
    about = f"{PODS * CONTAINERS} containers, alloc.policy {policy}, {name}"
    async with contextlib.AsyncExitStack() as closing:
        runtime: _Played | _Real
        if release is None:
            played = Runtime(folder / "nri.sock")
            runtime = _Played(await closing.enter_async_context(played), policy)
        else:
            (folder / "c").mkdir()
            place = private_containerd(folder / "c", bench.dirs, release=release)
            runtime = _Real(closing.enter_context(place), policy)
        relay = closing.enter_context(Relay(folder / "relay.sock", runtime.socket))
        full, tree = _node(folder, relay.path, policy)
        await runtime.fill(full)
        await closing.enter_async_context(full)
        await runtime.synchronized()
        await full.until(lambda: relay.count("Synchronize"), "Synchronize", 60)
        await full.until(lambda: _all_pinned(full, runtime.pods), "pins of all sandboxes", 120)
        for number in range(rounds):
            relay.drop()
            await runtime.synchronized()
            await full.until(
                lambda: relay.count("Synchronize") > number + 1,  # noqa: B023
                "Synchronize",
                60,
            )
            await runtime.churn(CREATIONS)
        runtime.check()
        relay.check()
        if ALL in {tree.masks[number] for number in range(FIRST, FIRST + MOVABLE)}:
            raise BenchError("an interrupt that can be moved may still fire on every pCPU")
    return list(_rows(about, relay, rounds))


def _rows(about: str, relay: Relay, rounds: int) -> Iterator[Row]:
    for method, taken in sorted(relay.taken.items()):
        if method == "Configure":
            continue
        bar = SYNCHRONIZE_MS if method == "Synchronize" else EVENT_MS
        samples = Samples(taken)
        yield Row(
            f"{method}, {about}", samples.percentile(99) * MS, "ms", len(taken), bar=bar,
            bar_on_ratio=False, detail=f"p50 {samples.median * MS:.2f}; {samples.spread}; "
            f"{rounds * CREATIONS} creations, {relay.dropped} times disconnected, all by us",
        )  # fmt: skip


def _node(folder: Path, nri: Path, policy: str) -> tuple[Node, WorkTree]:
    node = Node(
        folder, sysfs=CPUS, quiet="full", nri={"enabled": "yes", "socket": str(nri)},
        audit={"affinity_s": 10, "deep_s": 60},
        alloc={"policy": policy, "eligibility": "relaxed", "allow": [{"namespace": "*"}]},
    )  # fmt: skip
    tree = node.kernel.tunables = WorkTree(node.host.folder, CPUS)
    tree.add_all({number: _line(number) for number in range(FIRST, FIRST + INTERRUPTS)})
    return node, tree


def _line(number: int) -> Line:
    own = number % CPUS
    about = f"PCI-MSIX-0000:00:02.0  {number}-edge      "
    if number < FIRST + MOVABLE:
        return Line(f"{about}eth0-rx-{number}", ALL, 0, counts={own: 7})
    return Line(f"{about}nvme0q{number}", str(own), 0, EPERM, 0o444, {own: 7})


def _all_pinned(node: Node, pods: list[str]) -> bool:
    return all(node.vms[one].masks["main"] != ALL for one in pods)


def _cpus(policy: str, pod_number: int, number: int) -> dict[str, Any]:
    """Return the CPU fields of a container as CRI names them: its pod's own CPUs, or shared.

    With an allocator here the kubelet gives no cpusets.
    """
    first = 16 + 4 * pod_number
    own = {"cpu_quota": 4 * PERIOD_US, "cpu_period": PERIOD_US, "cpu_shares": 4096}
    size, cpus = ({"cpu_shares": 102}, SHARED) if number else (own, f"{first}-{first + 3}")
    return size if policy != "none" else size | {"cpuset_cpus": cpus}


class Relay:
    """Passes an NRI connection on and takes the time of each call; runs in a thread."""

    def __init__(self, path: Path, runtime: Path) -> None:
        self.path = path
        self.taken: dict[str, list[float]] = {}
        self.dropped = 0
        self._runtime = runtime
        self.lost: list[str] = []
        self._dropping = False
        self._ends: list[socket.socket] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        serving = asyncio.start_unix_server(self._pass_on, self.path)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def count(self, method: str) -> int:
        """Return how many calls of a method were answered."""
        return len(self.taken.get(method, ()))

    def drop(self) -> None:
        """Close the connection, as a runtime does that is restarted."""
        self.dropped += 1
        self._dropping = True
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise BenchError if one side closed a connection that served."""
        if self.lost:
            raise BenchError(f"disconnected by {', '.join(self.lost)}")

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_unix_connection(self._runtime)
        calls: dict[int, tuple[str, float]] = {}
        before = self.count("Synchronize")
        self._ends = [one.get_extra_info("socket") for one in (writer, upstream[1])]
        both = [
            asyncio.create_task(self._pump(upstream[0], writer, self._called(calls))),
            asyncio.create_task(self._pump(reader, upstream[1], self._answered(calls))),
        ]
        try:
            first, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self.count("Synchronize") > before and not self._dropping:
                self.lost.append("containerd" if both[0] in first else "kata-pin")
            self._dropping = False
        finally:
            for one in both:
                one.cancel()
            for end in (writer, upstream[1]):
                end.close()

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, seen: Callable[..., None]
    ) -> None:
        trunk, frames = MuxDecoder(), FrameDecoder()
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                for connection, piece in trunk.feed(data):
                    for frame in frames.feed(piece) if connection == ttrpc.PLUGIN else ():
                        seen(frame.stream, frame.data, time.perf_counter())
                target.write(data)
                await target.drain()

    def _called(self, calls: dict[int, tuple[str, float]]) -> Callable[..., None]:
        def seen(stream: int, data: bytes, now: float) -> None:
            calls[stream] = (ttrpc.parse_request(data).method, now)

        return seen

    def _answered(self, calls: dict[int, tuple[str, float]]) -> Callable[..., None]:
        def seen(stream: int, _: bytes, now: float) -> None:
            method, began = calls.pop(stream)
            self.taken.setdefault(method, []).append(now - began)

        return seen


class _Played:
    """The runtime double of tests/support."""

    def __init__(self, listening: Runtime, policy: str) -> None:
        self._policy = policy
        self.socket = listening.path
        self.pods: list[str] = []
        self._listening = listening
        self._peer: Peer | None = None
        self._pods: list[pb.PodSandbox] = []
        self._containers: list[pb.Container] = []
        self._made = 0

    async def fill(self, node: Node) -> None:
        """Make the pods, their VMs and their containers."""
        for number in range(PODS):
            vm = node.vm(f"p{number}", vcpus=5)
            self.pods.append(vm.id)
            self._pods.append(pod(vm.id, uid=f"uid-{vm.id}", pid=vm.pid))
            self._containers += [
                _played(f"{vm.id}-c{index}", vm.id, _cpus(self._policy, number, index), state=3)
                for index in range(CONTAINERS)
            ]

    async def synchronized(self) -> None:
        """Take the plugin that connects next and tell it everything."""
        self._peer = await self._listening.plugin()
        await self._peer.registered()
        await self._peer.configure("v2.4.0")
        await self._peer.synchronize(self._pods, self._containers)

    async def churn(self, count: int) -> None:
        """Tell of containers from their creation to their removal."""
        peer = self._peer
        assert peer is not None
        for _ in range(count):
            self._made += 1
            number = self._made % PODS
            told = _played(f"churn-{self._made}", self.pods[number], _cpus(self._policy, number, 1))
            for kind in EventKind:
                if not kind.of_pod:
                    await peer.event(kind, self._pods[number], told)

    def check(self) -> None:
        """Nothing: a plugin that hung up fails the next call."""


def _played(name: str, of: str, cri: Mapping[str, Any], **fields: Any) -> pb.Container:
    cpu = pb.LinuxCPU(
        cpus=cri.get("cpuset_cpus", ""),
        shares=pb.OptionalUInt64(value=cri["cpu_shares"]),
        quota=pb.OptionalInt64(value=cri.get("cpu_quota", 0)),
        period=pb.OptionalUInt64(value=PERIOD_US),
    )
    linux = pb.LinuxContainer(
        resources=pb.LinuxResources(cpu=cpu), cgroups_path=f"/kubepods/pod{of}/{name}"
    )
    return container(name, of, linux=linux, **fields)


class _Real:
    """A real containerd, asked through CRI in a thread."""

    def __init__(self, place: Containerd, policy: str) -> None:
        self._policy = policy
        self._here = {"cpuset_cpus": "0"} if policy == "none" else {}
        """A pCPU that this machine has, for what is started; an allocator takes none of these."""
        self.socket = place.nri_socket
        self.pods: list[str] = []
        self._place = place
        self._made = 0

    async def fill(self, node: Node) -> None:
        """Make the pods, their VMs and their containers."""
        await asyncio.to_thread(self._create)
        for one in self.pods:
            node.vms[one] = node.vm(one, vcpus=5)

    async def synchronized(self) -> None:
        """Nothing: it connects by itself."""

    async def churn(self, count: int) -> None:
        """Create containers and remove them."""
        await asyncio.to_thread(self._churn, count)

    def check(self) -> None:
        """Raise BenchError if containerd says that it lost or dropped the plugin by itself."""
        for line in self._place.log.splitlines():
            if "deadline exceeded" in line and "nri" in line.lower():
                raise BenchError(f"containerd: {line}")

    def _create(self) -> None:
        cri = self._place.cri
        for number in range(PODS):
            made = cri.run_pod(f"p{number}")
            self.pods.append(made)
            for index in range(CONTAINERS):
                cri.create(
                    made, f"c{index}", pod_name=f"p{number}", **_cpus(self._policy, number, index)
                )

    def _churn(self, count: int) -> None:
        cri = self._place.cri
        for _ in range(count):
            self._made += 1
            number = self._made % PODS
            size = _cpus(self._policy, number, 1) | self._here
            made = cri.create(
                self.pods[number], f"churn-{self._made}", pod_name=f"p{number}", **size
            )
            if self._here and self._made % STARTED == 0:
                cri.start(made)
                cri.update(made, cpuset_cpus="0")
                cri.stop(made)
            cri.remove(made)
