"""kill -9 at any moment: no recorded container is lost, no thread stays on a wrong mask."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.support import mortal
from tests.support.daemon import Node, Pod
from tests.support.killstorm import Storm, started
from tests.support.mortal import Mortal
from tests.support.qemu import Machine
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root, pytest.mark.slow]

KILLS = 200
MOST_KILLS = 1000
"""Where hooks are slow, more kills until enough of them met a daemon, and enough met none."""

LONGEST_LIFE_S = 0.1
"""From its start, or every second time from when it listens: kills hit starts and work alike."""

STRIDE = 3

SMALL = Machine(boot=2, maximum=2)


@pytest.fixture(scope="module", autouse=True)
def _forked_from() -> None:
    mortal.prepare()


@pytest.mark.timeout(600)
def test_killed_at_random_moments(node: Node) -> None:
    """Kills while hooks arrive: every hook is recorded in the end, every thread is right."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    with node.pod("p1", machine=SMALL) as one, node.pod("p2", machine=SMALL) as two:
        storm = Storm(node, [one, two], random.Random(seed))
        with storm.raging():
            kills = 0
            while kills < KILLS or (kills < MOST_KILLS and not storm.both_ways):
                daemon = started(node, at_work=bool(kills % 2))
                kills += 1
                # A random moment is what is tested: there is no condition to wait for. On a slow
                # machine the spool grows, and only longer lives get beyond taking it in.
                slow = max(1.0, kills / KILLS) ** 2
                time.sleep(chance.uniform(0, LONGEST_LIFE_S * slow))
                daemon.kill()
        told = f"seed {seed}: {storm.acknowledged} acknowledged, {storm.spooled} spooled"
        assert storm.problems == []
        assert storm.both_ways, told
        node.start()
        assert storm.wrong() == [], told


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
        counting = {one.id for one in registered.values() if one.counts}
        assert counting - {pod.id} == {"c1", "c3"}, f"step {step}"
        assert pod.misplaced({1}) == []
    finally:
        after.kill()
    return died
