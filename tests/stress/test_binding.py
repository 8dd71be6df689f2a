"""A thousand bindings with faults: each is applied whole, or not at all."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from tests.support.recordedpod import QEMU, SANDBOX, VCPUS, RecordedPod
from tests.support.world import cpus
from tests.unit.placement.test_binding import BINDING, BOUND, FREE, OTHERS, POD, masks


class Killed(BaseException):
    """The daemon was killed."""


class Faults:
    """What goes wrong at some system call of a pass, each in its own way."""

    def __init__(self, pod: RecordedPod, chance: random.Random) -> None:
        self._pod, self._chance = pod, chance
        self._left = chance.randrange(0, 14)
        self.fault = chance.choice(
            [self.nothing, self.refuse, self.die, self.kill, self.offline, self.narrow, self.take]
        )
        self.undo: Callable[[], None] = lambda: None
        self.done = False

    def __call__(self, tid: int) -> None:
        """Count a call; the one whose turn it is goes wrong."""
        self._left -= 1
        if self._left == -1:
            self.done = True
            self.fault(tid)

    def nothing(self, _tid: int) -> None:
        """Everything goes well."""

    def refuse(self, tid: int) -> None:
        """The kernel refuses one affinity."""
        raise OSError(self._chance.choice([errno.EPERM, errno.EINVAL, errno.EACCES]), "no")

    def die(self, tid: int) -> None:
        """A vCPU thread exits, whichever is being set."""
        gone = self._chance.choice(VCPUS)
        self.undo = hide(self._pod, gone)
        if gone == tid:
            raise ProcessLookupError(errno.ESRCH, "no such thread")

    def kill(self, _tid: int) -> None:
        """The daemon is killed."""
        raise Killed

    def offline(self, _tid: int) -> None:
        """A CPU of the binding goes off; the kernel moves its threads."""
        pod, cpu = self._pod, self._chance.choice([4, 5, 9, 8])
        pod.offline, before = str(cpu), pod.kernel.online
        pod.kernel.online = before - {cpu}
        for tid, mask in pod.kernel.affinities.items():
            pod.kernel.affinities[tid] = frozenset(mask) - {cpu} or pod.kernel.online

        def undo() -> None:
            pod.offline, pod.kernel.online = "", before

        self.undo = undo

    def narrow(self, _tid: int) -> None:
        """Kata narrows the pod's cgroup."""
        self._pod.kernel.write_cpuset(self._chance.choice(["0-3,6-15", "0-4,6-15", "0-8,10-15"]))
        self.undo = lambda: self._pod.kernel.write_cpuset("0-15")

    def take(self, _tid: int) -> None:
        """Another pod gets a CPU exclusively."""
        self._pod.beside = cpus(self._chance.choice(["4", "5", "8", "9"]))

        def undo() -> None:
            self._pod.beside = cpus("")

        self.undo = undo


def hide(pod: RecordedPod, tid: int) -> Callable[[], None]:
    """Let a thread exit, until what is returned is called: a new thread for the same vCPU."""
    there = Path(pod.root.proc(QEMU, "task", tid))
    away = there.parents[3] / f"gone-{tid}"
    if not there.exists():
        return lambda: None
    shutil.move(there, away)
    mask = pod.kernel.affinities.pop(tid)

    def show() -> None:
        shutil.move(away, there)
        pod.kernel.affinities[tid] = mask

    return show


def test_a_thousand_bindings_with_faults_leave_none_half_applied(tmp_path: Path) -> None:
    """Threads that die, CPUs that go off, cgroups, other pods, kills: all of it, or nothing."""
    with closing(RecordedPod(tmp_path)) as pod:
        pod.run(*POD)
        outcomes, faulty = _bound_again_and_again(pod, random.Random(20261127))
    assert min(outcomes.values()) > 100
    assert faulty > 500


def _bound_again_and_again(pod: RecordedPod, chance: random.Random) -> tuple[dict[str, int], int]:
    """Return how many bindings were whole or undone, and in how many something went wrong."""
    outcomes = {"whole": 0, "undone": 0}
    faulty = 0
    for number in range(1000):
        faults = Faults(pod, chance)
        pod.pins.bind(SANDBOX, BINDING)
        pod.kernel.before_set = faults
        with suppress(Killed):
            pod.run(*POD)
        pod.kernel.before_set = lambda _tid: None
        if chance.random() < 0.3 or faults.fault == faults.kill:
            pod.restart()
        pod.run(*POD)
        living = [tid for tid in (*VCPUS, *OTHERS) if tid in pod.kernel.affinities]
        now = pod.masks(living)
        if pod.pins.binding(SANDBOX) is not None:
            assert now == BOUND, f"bind {number}: {faults.fault.__name__}"
            outcomes["whole"] += 1
        else:
            there = [set(cpus(mask)) for mask in now]
            held = {"4", "5", "9"} & set(now)
            assert not held, f"bind {number}: {faults.fault.__name__}: {now}"
            assert {8} not in there
            outcomes["undone"] += 1
        faulty += faults.done
        faults.undo()
        pod.pins.bind(SANDBOX, None)
        pod.run(*POD)
        pod.run(*POD)
        assert masks(pod) == FREE, f"bind {number}: {faults.fault.__name__}"
    return outcomes, faulty
