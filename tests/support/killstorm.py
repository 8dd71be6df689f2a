"""Hooks of changing containers while the daemon is killed again and again."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kata_pin.base.cpuset import CpuSet
from tests.support.daemon import Node, Pod
from tests.support.mortal import Mortal
from tests.support.waiting import wait_for


def started(node: Node, *, at_work: bool) -> Mortal:
    """Start a daemon, and wait until it listens if it is to be `at_work`."""
    listening = node.runtime_dir / "hook.sock"
    if at_work:
        listening.unlink(missing_ok=True)
    daemon = Mortal(node.config, node.root / "daemon.log")
    if at_work:
        wait_for(listening.exists, "the daemon to listen")
    return daemon


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
    _turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def both_ways(self) -> bool:
        """Whether enough hooks met a daemon, and enough met none."""
        return min(self.acknowledged, self.spooled) > 20

    @contextlib.contextmanager
    def raging(self) -> Iterator[None]:
        """Run hooks in a thread of its own until the end of the block."""
        for pod in self.pods:
            pod.write_bundle(pod.id, kind="sandbox")
        (self.node.runtime_dir / "spool").mkdir(parents=True, exist_ok=True)
        stop = threading.Event()
        hooks = threading.Thread(target=self._run, args=(stop,))
        hooks.start()
        try:
            yield
        finally:
            stop.set()
            hooks.join()

    @contextlib.contextmanager
    def lull(self) -> Iterator[None]:
        """Let no hook run within the block."""
        with self._turn:
            yield

    def wrong(self) -> list[str]:
        """Return what is not as it must be once the running daemon has taken the spool in.

        Called in a lull, or when the storm is over.
        """
        lines: list[str] = []
        try:
            wait_for(lambda: not self.node.spooled(), "the spool to be taken in")
            for pod in self.pods:
                pod.wait_placed(self.mask(pod))
        except TimeoutError as error:
            lines.append(str(error))
        return lines + list(self._misrecorded())

    def _run(self, stop: threading.Event) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with self._turn:
                if len(self.alive) > 6 or (len(self.alive) > 2 and self.chance.random() < 0.4):
                    self._end(self.chance.choice(sorted(self.alive)))
                else:
                    self._begin(f"c{number}")
            time.sleep(0)  # whoever waits for a lull gets its turn

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

    def _misrecorded(self) -> Iterator[str]:
        registered = self.node.registered()
        for name, (pod, cpus) in self.alive.items():
            found = registered.get(name)
            if found is None:
                yield f"{name} is lost"
            elif (found.sandbox_id, str(found.cpus)) != (pod.id, cpus) or not found.counts:
                yield f"{name} of {pod.id} on {cpus} is recorded as {found}"
        for name in self.over & registered.keys():
            if registered[name].counts:
                yield f"{name} still counts"
        for path in (self.node.runtime_dir / "spool" / "bad").glob("*"):
            yield f"{path.name} was rejected"
        for path in self.node.runtime_dir.glob("registry.db.*"):
            yield f"the registry was taken for damaged: {path.name}"
