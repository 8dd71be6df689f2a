"""kill -9 at any moment: no recorded container is lost, no thread stays on a wrong mask."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kata_pin.model.cpuset import CpuSet
from tests.support import mortal
from tests.support.daemon import Node, Pod, private_node
from tests.support.mortal import Mortal
from tests.support.qemu import Machine
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root, pytest.mark.slow]

KILLS = 200
LONGEST_LIFE_S = 0.1
"""From its start, or every second time from when it listens: kills hit starts and work alike."""

STRIDE = 3

SMALL = Machine(boot=2, maximum=2)


@pytest.fixture(scope="module", autouse=True)
def _forked_from() -> None:
    mortal.prepare()


@pytest.fixture
def node() -> Iterator[Node]:
    with private_node() as one:
        yield one


@dataclass
class Storm:
    """Hooks of changing containers, one after the other; `alive` and `over` is what must be known.

    Kata's own state never tells of these containers: only hooks and the spool do.
    """

    node: Node
    pods: list[Pod]
    chance: random.Random
    alive: dict[str, tuple[Pod, str]] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    acknowledged: int = 0
    spooled: int = 0
    problems: list[str] = field(default_factory=list)

    def run(self, stop: threading.Event) -> None:
        """Run hooks until told to stop."""
        number = 0
        while not stop.is_set():
            number += 1
            if len(self.alive) > 6 or (len(self.alive) > 2 and self.chance.random() < 0.4):
                self._end(self.chance.choice(sorted(self.alive)))
            else:
                self._begin(f"c{number}")

    def _begin(self, name: str) -> None:
        pod, cpus = self.chance.choice(self.pods), self.chance.choice(["0", "1", "0-1"])
        pod.write_bundle(name, cpus)
        phase = self.chance.choice(["createRuntime", "createRuntime", "poststart"])
        self._count(
            self.node.hook(phase, name, pod.kata.pid, "--record-ms=250", "--pin-ms=50").stderr
        )
        self.alive[name] = (pod, cpus)

    def _end(self, name: str) -> None:
        pod, _ = self.alive.pop(name)
        self._count(self.node.hook("poststop", name, 1, "--record-ms=250", state_id=pod.id).stderr)
        self.over.add(name)

    def _count(self, said: str) -> None:
        if "spooled, not recorded" in said:
            self.spooled += 1
        elif said == "" or "recorded, pins" in said or "unpinned" in said:
            self.acknowledged += 1
        else:
            self.problems.append(said)

    def mask(self, pod: Pod) -> set[int]:
        """Return where the threads of a pod belong."""
        cpus = [CpuSet.parse(cpus) for owner, cpus in self.alive.values() if owner is pod]
        return {cpu for each in cpus for cpu in each} or os.sched_getaffinity(0)


@pytest.mark.timeout(240)
def test_killed_at_random_moments(node: Node) -> None:
    """200 kills while hooks arrive: every hook is recorded in the end, every thread is right."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    log, listening = node.root / "daemon.log", node.runtime_dir / "hook.sock"
    with node.pod("p1", machine=SMALL) as one, node.pod("p2", machine=SMALL) as two:
        for pod in (one, two):
            pod.write_bundle(pod.id, kind="sandbox")
        storm = Storm(node, [one, two], random.Random(seed))
        (node.runtime_dir / "spool").mkdir(parents=True)
        stop = threading.Event()
        hooks = threading.Thread(target=storm.run, args=(stop,))
        hooks.start()
        try:
            for number in range(KILLS):
                if number % 2:  # one at work, which on a busy machine takes its time to be
                    listening.unlink(missing_ok=True)
                daemon = Mortal(node.config, log)
                wait_for(lambda: number % 2 == 0 or listening.exists(), "the daemon to listen")  # noqa: B023 - called at once
                # A random moment is what is tested: there is no condition to wait for.
                time.sleep(chance.uniform(0, LONGEST_LIFE_S))
                daemon.kill()
        finally:
            stop.set()
            hooks.join()
        told = f"seed {seed}: {storm.acknowledged} acknowledged, {storm.spooled} spooled"
        print(told)
        assert storm.problems == []
        assert storm.acknowledged > 20, told
        assert storm.spooled > 20, told
        node.start()
        wait_for(lambda: not node.spooled(), "the spool to be taken in")
        for pod in (one, two):
            pod.wait_placed(storm.mask(pod))
        _check_records(node, storm, told)


def _check_records(node: Node, storm: Storm, told: str) -> None:
    registered = node.registered()
    for name, (pod, cpus) in storm.alive.items():
        found = registered.get(name)
        assert found is not None, f"{name} is lost ({told})"
        assert (found.sandbox_id, str(found.cpus)) == (pod.id, cpus)
        assert found.state.counts
    for name in storm.over & registered.keys():
        assert not registered[name].state.counts, f"{name} still counts ({told})"
    assert list((node.runtime_dir / "spool" / "bad").glob("*")) == []
    assert list(node.runtime_dir.glob("registry.db.*")) == []  # never taken for damaged


@pytest.mark.timeout(240)
def test_killed_before_any_step(node: Node) -> None:
    """Killed before each third step of a start and three hooks, all is right after the next start.

    The first one is chosen by chance, so that a few runs cover all.
    """
    log = node.root / "daemon.log"
    with node.pod("p1", machine=SMALL) as pod:
        pod.write_bundle(pod.id, kind="sandbox")
        for name, cpus in (("c1", "1"), ("c2", "0"), ("c3", "1")):
            pod.write_bundle(name, cpus)
        first = random.randrange(1, STRIDE + 1)
        for step in range(first, 1000, STRIDE):
            if not _killed_at(node, pod, step):
                break
        print(f"steps {first} to {step} by {STRIDE}")
        assert 40 < step < 999
    assert "Traceback" not in log.read_text()


def _killed_at(node: Node, pod: Pod, step: int) -> bool:
    """Run the story with a death before one step; return whether there was such a step."""
    for path in sorted(node.runtime_dir.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (node.runtime_dir / "spool").mkdir(parents=True)
    for tid in pod.kata.tids():
        os.sched_setaffinity(tid, {0, 1})
    budgets = ("--record-ms=250", "--pin-ms=250")
    node.hook("createRuntime", "c1", pod.kata.pid, *budgets)  # into the spool
    daemon = Mortal(node.config, node.root / "daemon.log", die_at=step)
    socket = node.runtime_dir / "hook.sock"
    wait_for(lambda: socket.exists() or not daemon.alive, "the daemon to listen or die")
    said = [
        node.hook("createRuntime", "c2", pod.kata.pid, *budgets).stderr,
        node.hook("createRuntime", "c3", pod.kata.pid, *budgets).stderr,
        node.hook("poststop", "c2", 1, *budgets, state_id=pod.id).stderr,
    ]
    assert not [line for line in said if "neither" in line]
    died = daemon.died(0.3)  # an idle daemon makes no step
    daemon.kill()
    after = Mortal(node.config, node.root / "daemon.log")
    try:
        pod.wait_placed({1})
        wait_for(lambda: not node.spooled(), "the spool to be taken in")
        registered = node.registered()
        counting = {one.id for one in registered.values() if one.state.counts}
        assert counting - {pod.id} == {"c1", "c3"}, f"step {step}"
        assert pod.misplaced({1}) == []
    finally:
        after.kill()
    return died
