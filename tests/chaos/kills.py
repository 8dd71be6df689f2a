"""The part `kill`: kill -9 at random moments of starts and of work, while hooks come and go.

Of two kills one hits a start. Before the other one the daemon is looked at: every container whose
hook ever ran must be recorded as it is, and every thread of the sandboxes must be where the
containers that live say. Meanwhile no hook runs, so that there is one truth.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator

from tests.bench.figures import Row, count_row
from tests.chaos import traffic
from tests.support import mortal
from tests.support.daemon import private_node
from tests.support.killstorm import Storm, started
from tests.support.qemu import Machine

LONGEST_LIFE_S = 0.1
SMALL = Machine(boot=2, maximum=2)


def measure(kills: int, _only: tuple[str, ...]) -> Iterator[Row]:
    """Yield what came of so many kills."""
    mortal.prepare()
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    wrong: list[str] = []
    left = 0
    with (
        private_node() as node,
        node.pod("p1", machine=SMALL) as one,
        node.pod("p2", machine=SMALL) as two,
    ):
        storm = Storm(node, [one, two], random.Random(seed))
        with storm.raging():
            for number in range(kills):
                at_work = bool(number % 2)
                daemon = started(node, at_work=at_work)
                if at_work:
                    with storm.lull():
                        wrong += [f"after {number} kills: {line}" for line in storm.wrong()]
                family = traffic.family(daemon.pid)
                # A random moment is what is tested: there is no condition to wait for.
                time.sleep(chance.uniform(0, LONGEST_LIFE_S))
                daemon.kill()
                left += _left(family)
        node.start()
        wrong += [f"at the end: {line}" for line in storm.wrong()]
        log = node.log
    for line in [*wrong, *storm.problems]:
        print(f"  {line}", file=sys.stderr)
    told = f"{storm.acknowledged} hooks acknowledged, {storm.spooled} spooled, seed {seed}"
    yield count_row("kill: records or pins wrong after a restart", len(wrong), kills, told)
    yield count_row("kill: hooks neither recorded nor spooled", len(storm.problems), kills)
    yield count_row("kill: helpers that outlived their daemon", left, kills)
    yield count_row("kill: tracebacks logged", log.count("Traceback"), kills)


def _left(family: list[int]) -> int:
    """Return how many processes still run a moment after their daemon was killed."""
    deadline = time.monotonic() + 0.5
    alive = family
    while (alive := [pid for pid in alive if traffic.runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.005)
    return len(alive)
