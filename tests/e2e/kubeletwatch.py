"""What the kubelet's checkpoint says and where every thread of every sandbox may run, all the time.

    with KubeletWatch() as watch:
        ...
        mark = watch.mark()
        ...                                    # the change
    watch.since(mark)                          # the samples, each different from the one before

A thread of the test's own process looks several times a second, or as often as it can. A look reads
the checkpoint first: a thread that is then on another pod's exclusive CPUs was so after the
checkpoint said that they are. QEMU and virtiofsd are found by name in the sandboxes' cgroups,
without kata-pin; they have them from their exec on, and the shim's hooks are in these cgroups too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Final, Self

from kata_pin.base.cpuset import CpuSet, union
from tests.e2e.minikata.cgroups import sandbox_path
from tests.e2e.realkubelet import read_checkpoint

PERIOD_S: Final = 0.25
"""Between two looks; one takes longer than that in an emulated machine."""
CGROUPS: Final = Path("/sys/fs/cgroup")
OVERHEAD: Final = CGROUPS / "kata_overhead"
BUNDLES: Final = Path("/run/containerd/io.containerd.runtime.v2.task/k8s.io")
PROGRAMS: Final = ("qemu-system", "virtiofsd")


@dataclass(frozen=True)
class Seen:
    """One sandbox: where each thread may run, by tid; `cpuset` is its cgroup's own.

    That is empty while the VM is only starting: Kata writes it for the first container.
    """

    uid: str
    threads: Mapping[int, CpuSet]
    cpuset: str


@dataclass(frozen=True)
class Sample:
    """What every look from `began` until `ended` saw (CLOCK_MONOTONIC)."""

    began: float
    ended: float
    default: CpuSet
    held: Mapping[str, CpuSet]
    pods: Mapping[str, Seen]

    def same(self, other: Sample) -> bool:
        """Whether two looks saw the same."""
        mine, theirs = (self.default, self.held, self.pods), (other.default, other.held, other.pods)
        return mine == theirs

    def of_others(self, uid: str) -> CpuSet:
        """Return what pods other than this one have exclusively."""
        return union(cpus for one, cpus in self.held.items() if one != uid)

    def trespassers(self) -> dict[str, dict[int, CpuSet]]:
        """Return the threads that may run on other pods' exclusive CPUs, and on which, by pod."""
        found: dict[str, dict[int, CpuSet]] = {}
        for name, pod in self.pods.items():
            others = self.of_others(pod.uid)
            there = {tid: cpus & others for tid, cpus in pod.threads.items() if cpus & others}
            if there:
                found[name] = there
        return found


@dataclass
class KubeletWatch:
    """Looks from its entry to its exit; `looks` are how often."""

    samples: list[Sample] = field(default_factory=list)
    looks: int = 0
    sandboxes: dict[str, str] = field(default_factory=dict)
    """The name of each sandbox's pod, by sandbox."""

    _homes: dict[str, tuple[str, Path]] = field(default_factory=dict)
    _programs: set[int] = field(default_factory=set)
    _over: Event = field(default_factory=Event)

    def __enter__(self) -> Self:
        self._look()
        self._thread = Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    # ---- what was seen -------------------------------------------------------------------

    def mark(self) -> int:
        """Return a mark of now for `since`."""
        return len(self.samples) - 1

    def since(self, mark: int) -> Sequence[Sample]:
        """Return the samples from a mark on: the first one is what there was at the mark."""
        return self.samples[mark:]

    @property
    def now(self) -> Sample:
        """The last sample."""
        return self.samples[-1]

    def sandbox(self, pod: str) -> str:
        """Return the sandbox of a pod that runs."""
        return next(one for one, name in reversed(self.sandboxes.items()) if name == pod)

    # ---- looking -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            self._look()

    def _look(self) -> None:
        default, held = read_checkpoint()
        began = time.monotonic()
        pods = dict(self._pods())
        sample = Sample(began, time.monotonic(), default, held, pods)
        self.looks += 1
        if self.samples and self.samples[-1].same(sample):
            self.samples[-1] = dataclasses.replace(self.samples[-1], ended=sample.ended)
        else:
            self.samples.append(sample)

    def _pods(self) -> Iterator[tuple[str, Seen]]:
        """Yield each sandbox that has threads, under its pod's name."""
        with contextlib.suppress(FileNotFoundError):
            for sandbox in os.listdir(OVERHEAD):
                if not (OVERHEAD / sandbox).is_dir() or not self._knows(sandbox):
                    continue
                uid, home = self._homes[sandbox]
                threads = self._threads(OVERHEAD / sandbox) | self._threads(home)
                if threads:
                    seen = Seen(uid, threads, _text(home / "cpuset.cpus"))
                    yield self.sandboxes[sandbox], seen

    def _knows(self, sandbox: str) -> bool:
        """Whether it is known whose a sandbox is, by its config.json."""
        if sandbox not in self._homes:
            try:
                spec = json.loads((BUNDLES / sandbox / "config.json").read_text())
            except (OSError, ValueError):
                return False
            about = spec["annotations"]
            self.sandboxes[sandbox] = about["io.kubernetes.cri.sandbox-name"].removesuffix("-node")
            path = sandbox_path(spec["linux"]["cgroupsPath"], sandbox, "kata_")
            self._homes[sandbox] = about["io.kubernetes.cri.sandbox-uid"], CGROUPS / path.strip("/")
        return True

    def _threads(self, cgroup: Path) -> dict[int, CpuSet]:
        """Return where each thread of the VM's programs in a cgroup may run."""
        found: dict[int, CpuSet] = {}
        for pid in map(int, _text(cgroup / "cgroup.procs").split()):
            if pid in self._programs or _text(Path(f"/proc/{pid}/comm")).startswith(PROGRAMS):
                self._programs.add(pid)
                found.update(_affinities(pid))
        return found


def _affinities(pid: int) -> Iterator[tuple[int, CpuSet]]:
    """Yield the threads of a process and where they may run; those that end are left out."""
    with contextlib.suppress(FileNotFoundError):
        for tid in map(int, os.listdir(f"/proc/{pid}/task")):
            with contextlib.suppress(ProcessLookupError):
                yield tid, CpuSet(os.sched_getaffinity(tid))


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
