"""Sixty sandboxes with churn, a daemon killed again and again, containerd restarted, hooks racing.

What is done is drawn from a seed; the test keeps its own books of every container's CPUs. At the
end the kernel is asked for the affinity of every thread, and what it should be follows from the
books alone, not from kata-pin.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import pytest

from tests.e2e.criruntime import CriNode, kata_handler, qemu_pid
from tests.e2e.fleet import Fleet, affinities, fleet, vhost_threads
from tests.e2e.idlevm import tids
from tests.e2e.node import Node
from tests.e2e.unit import Unit
from tests.support.waiting import SCALE

pytestmark = pytest.mark.usefixtures("kvm", "untouched")

SEED: Final = 20261120
SANDBOXES: Final = 60
CRI_PODS: Final = 4
WORKERS: Final = 4
STEPS: Final = 20
"""Random steps of each worker, once its sandboxes are up."""
KILLS: Final = 3
SHARED_CPUS: Final = range(8)
EXCLUSIVE_CPUS: Final = range(8, 16)
CPU: Final = 100_000


@dataclass
class Sandbox:
    """One sandbox in the books: the CPUs of its containers, by name."""

    id: str
    shared: dict[str, set[int]] = field(default_factory=dict)
    exclusive: dict[str, int] = field(default_factory=dict)
    made: int = 0

    def rest(self) -> set[int]:
        """Return where every thread belongs that is not paired with an exclusive pCPU."""
        return set().union(*self.shared.values()) or set(self.exclusive.values())


class ExclusiveCpus:
    """Hands out exclusive pCPUs, as the kubelet does: none to two containers."""

    def __init__(self) -> None:
        self._free = list(EXCLUSIVE_CPUS)
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """Return a free one, None when there is none."""
        with self._lock:
            return self._free.pop(0) if self._free else None

    def give_back(self, cpu: int) -> None:
        """Take one back."""
        with self._lock:
            self._free.append(cpu)


class Worker:
    """Does random things to sandboxes of its own; what it does depends on the seed alone.

    But for exclusive pCPUs: who gets the free ones depends on the race.
    """

    def __init__(self, number: int, ships: Fleet, cpus: ExclusiveCpus) -> None:
        self._random = random.Random(SEED + number)
        self._ships = ships
        self._cpus = cpus
        self.number = number
        self.sandboxes: list[Sandbox] = []
        self.counts: Counter[str] = Counter()

    def launch(self, count: int) -> None:
        """Create sandboxes, each with one shared container."""
        for _ in range(count):
            self._launch()

    def churn(self) -> None:
        """Take random steps."""
        steps = {
            self._add_shared: 4,
            self._add_exclusive: 4,
            self._remove: 4,
            self._move: 5,
            self._resize: 5,
            self._replace: 2,
        }
        for _ in range(STEPS):
            step = self._random.choices(list(steps), list(steps.values()))[0]
            step(self._random.choice(self.sandboxes))

    def _launch(self) -> None:
        self.counts["sandboxes created"] += 1
        one = Sandbox(f"f{self.number}-{self.counts['sandboxes created']}")
        self._ships.create(one.id, one.id)
        self.sandboxes.append(one)
        self._add_shared(one)

    def _replace(self, one: Sandbox) -> None:
        """Delete a sandbox with all its containers, and create another."""
        for name in [*one.shared, *one.exclusive]:
            self._ships.delete(name)
        self._ships.delete(one.id)
        for cpu in one.exclusive.values():
            self._cpus.give_back(cpu)
        self.sandboxes.remove(one)
        self.counts["sandboxes deleted"] += 1
        self._launch()

    def _add_shared(self, one: Sandbox) -> None:
        cpus = self._some_shared()
        name = self._new_name(one)
        self._ships.create(name, one.id, cpus=_text(cpus), shares=102)
        one.shared[name] = cpus

    def _add_exclusive(self, one: Sandbox) -> None:
        cpu = self._cpus.take()
        if cpu is None:
            return
        name = self._new_name(one)
        self._ships.create(name, one.id, cpus=str(cpu), quota=CPU, period=CPU)
        one.exclusive[name] = cpu

    def _remove(self, one: Sandbox) -> None:
        """Delete a container, but never the last one with a cpuset."""
        names = [*one.shared, *one.exclusive]
        if len(names) < 2:
            return
        name = self._random.choice(names)
        self._ships.delete(name)
        one.shared.pop(name, None)
        if name in one.exclusive:
            self._cpus.give_back(one.exclusive.pop(name))
        self.counts["containers deleted"] += 1

    def _move(self, one: Sandbox) -> None:
        """Give a shared container other CPUs; no hook tells of it."""
        if one.shared:
            name = self._random.choice(list(one.shared))
            one.shared[name] = self._some_shared()
            self._ships.update(name, cpus=_text(one.shared[name]))
            self.counts["cpusets updated"] += 1

    def _resize(self, one: Sandbox) -> None:
        """Give a shared container another quota: vCPUs come or go; no hook tells of it."""
        if one.shared:
            name = self._random.choice(list(one.shared))
            quota = self._random.choice((CPU // 10, CPU, 2 * CPU, 3 * CPU)) + 1
            self._ships.update(name, quota=quota, period=CPU)
            self.counts["quotas updated"] += 1

    def _some_shared(self) -> set[int]:
        return set(self._random.sample(SHARED_CPUS, self._random.randint(1, 4)))

    def _new_name(self, one: Sandbox) -> str:
        one.made += 1
        self.counts["containers created"] += 1
        return f"{one.id}-c{one.made}"


@pytest.fixture(scope="module")
def unit(node: Node) -> Unit:
    """The installed unit."""
    return Unit(node)


@pytest.fixture(scope="module")
def ships(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Sandboxes that are commanded directly; no virtiofsd and no card, for memory and time."""
    lean = {"virtiofsd": False, "network": False, "default_vcpus": 1}
    with fleet(node, tmp_path_factory.mktemp("fl"), **lean) as made:
        yield made


@pytest.fixture(scope="module")
def containerd(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CriNode]:
    """Some pods are containerd's."""
    with kata_handler(node, tmp_path_factory.mktemp("cri"), virtiofsd=False) as made:
        yield made


@pytest.mark.timeout(200 * SCALE)
def test_sixty_sandboxes_with_churn(
    node: Node, unit: Unit, containerd: CriNode, ships: Fleet
) -> None:
    """After all of it every thread of every sandbox is where the books say, counted."""
    # The ships go first at the end, for that is quick, and containerd is slow beside them.
    began = time.time()
    cpus = ExclusiveCpus()
    workers = [Worker(number, ships, cpus) for number in range(WORKERS)]
    restarts = int(unit.show("NRestarts")["NRestarts"])
    with ThreadPoolExecutor(WORKERS + 1) as pool:
        pods = pool.submit(_cri_pods, containerd)
        share = (SANDBOXES - CRI_PODS) // WORKERS
        for work in [pool.submit(worker.launch, share) for worker in workers]:
            work.result()
        books = pods.result()
        _say(node, began, f"{SANDBOXES} sandboxes are up")
        running = [pool.submit(worker.churn) for worker in workers]
        _make_trouble(unit, containerd)
        for work in running:
            work.result()
    books |= {one.id: one for worker in workers for one in worker.sandboxes}
    counts = sum((worker.counts for worker in workers), Counter[str]())
    _say(node, began, f"churn is over: {dict(counts)}, {KILLS} kills, 1 restart of containerd")
    _settle(node, unit, books)
    _say(node, began, "all is in place")
    threads = _compare(unit, books)
    _say(node, began, f"{len(books)} sandboxes, {threads} threads, all where the books say")
    assert len(books) == SANDBOXES
    assert int(unit.show("NRestarts")["NRestarts"]) == restarts + KILLS
    assert "atchdog timeout" not in unit.journal(since=began)


def _cri_pods(containerd: CriNode) -> dict[str, Sandbox]:
    """Create pods through containerd, each with a shared container."""
    books = {}
    for number in range(CRI_PODS):
        name = f"churn{number}"
        pod = containerd.run_pod(name)
        containerd.create(pod, name, "app", cpuset_cpus=f"{number}", cpu_shares=102)
        books[pod] = Sandbox(pod, shared={"app": {number}})
    return books


def _make_trouble(unit: Unit, containerd: CriNode) -> None:
    """Kill the daemon while hooks race: while it serves, while it starts, while it serves."""
    first = unit.wait_running()
    os.kill(first, signal.SIGKILL)
    second = unit.wait_starting(other_than=first)
    os.kill(second, signal.SIGKILL)
    containerd.restart()
    third = unit.wait_running(other_than=second)
    os.kill(third, signal.SIGKILL)
    unit.wait_running(other_than=third)


def _settle(node: Node, unit: Unit, books: dict[str, Sandbox]) -> None:
    """Wait until nothing is wrong; tell what is, if it stays wrong."""
    lines: list[str] = []

    def right() -> bool:
        workers = vhost_threads()
        lines[:] = [line for one in books.values() for line in _wrong(one, workers)]
        if unit.spooled():
            lines.append("the spool is not empty")
        return not lines

    try:
        node.wait(right, "every thread in place", seconds=20)
        node.wait(lambda: _states(unit) == {"ok": len(books)}, "kata-pin to say so", seconds=20)
    except AssertionError as error:
        error.add_note(f"{len(lines)} wrong\n" + "\n".join(lines[:40]))
        raise


def _states(unit: Unit) -> Counter[str]:
    return Counter(one["state"] for one in unit.state()["sandboxes"])


def _compare(unit: Unit, books: dict[str, Sandbox]) -> int:
    """Assert that daemon, kernel and books agree; return the number of threads."""
    shown = {one["id"]: one for one in unit.state()["sandboxes"]}
    assert set(shown) == set(books)
    assert {one["state"] for one in shown.values()} == {"ok"}
    total = 0
    workers = vhost_threads()
    for one in books.values():
        masks = affinities(_threads(one, workers))
        told = {t["tid"]: t["affinity"] for t in shown[one.id]["threads"] if t["role"] != "shim"}
        assert set(masks) <= set(told), f"{one.id}: threads that kata-pin does not know"
        total += len(masks)
        assert _wrong(one, workers) == []
    return total


def _wrong(one: Sandbox, workers: dict[int, set[int]]) -> list[str]:
    """Return a line for what is not as the books say: one thread alone on each exclusive pCPU."""
    missing = Counter(frozenset({cpu}) for cpu in one.exclusive.values())
    lines = []
    for tid, mask in affinities(_threads(one, workers)).items():
        if missing[mask] > 0:
            missing[mask] -= 1
        elif mask != one.rest():
            lines.append(f"{one.id}: thread {tid} on {sorted(mask)}, not {sorted(one.rest())}")
    return lines + [f"{one.id}: no thread on {sorted(mask)}" for mask, n in missing.items() if n]


def _threads(one: Sandbox, workers: dict[int, set[int]]) -> set[int]:
    pid = qemu_pid(one.id)
    return tids(pid) | workers.get(pid, set())


def _text(cpus: set[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


def _say(node: Node, began: float, text: str) -> None:
    node.tell(f"churn, {time.time() - began:.0f} s: {text}")
