"""The pod of runtime-rs recorded in tests/data/kata-4.1, on a kernel that is played.

Processes, threads, cgroup, debugfs and state.json are the recorded ones. What a cpuset and
sched_setaffinity do to the threads is played as Linux 6.2 and later do it
(masks-over-update.txt of the recording shows the same). The engine and all that reads are real.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import Node, Report
from kata_pin.base.sandbox import Container
from kata_pin.base.steps import finish
from kata_pin.engine.node import NodeWatch
from kata_pin.engine.observe import ThreadFinder, VmmSearch
from kata_pin.engine.passes import Engine
from kata_pin.engine.sandbox_cache import KataPinningReader, SandboxCache
from kata_pin.linux.cgroup_mounts import CgroupMount, cgroup_mounts
from kata_pin.linux.files import HostRoot
from kata_pin.linux.process import ProcessIndex
from kata_pin.records.bundles import BundleReader
from kata_pin.records.containers import Registry
from kata_pin.records.pins import AcceptedVmms, Pins
from kata_pin.vmm.find import Executables, VmmFinder
from kata_pin.vmm.state_files import KataPaths
from tests.support import world
from tests.support.hosttree import FakeCalls, FakeHost
from tests.support.vmmhost import facts, no_survey

DATA: Final = Path(__file__).parents[1] / "data" / "kata-4.1"
SANDBOX: Final = "6bef26cf51cfeba8ae338e038ce8367c1c19fd56e2a79ccd3f1f19ae20d446cc"
CGROUP: Final = f"/kubepods/poduid-fix/{SANDBOX}"
QEMU: Final = 774
VCPUS: Final = (782, 783, 784)
"""The vCPU threads by index, as KVM's debugfs has them."""
VIRTIOFSD: Final = (769, 771, 772, 773, 778)
EVERY_CPU: Final = frozenset(range(16))


class PlayedKernel(FakeCalls):
    """What a written cpuset and sched_setaffinity do to threads in the pod's cgroup.

    A thread that set an affinity keeps it in mind: it has what of it the cpuset allows, or all
    that the cpuset allows where that is nothing. `before_read` runs before an affinity is read.
    """

    def __init__(self, folder: Path, members: Collection[int] = ()) -> None:
        super().__init__(EVERY_CPU)
        self.before_read: Callable[[int], None] = lambda _: None
        self.members = list(members)
        self._asked: dict[int, frozenset[int]] = {}
        self._folder = folder
        self._cpuset = EVERY_CPU

    def get_affinity(self, tid: int) -> set[int]:
        """Return the thread's affinity."""
        self.before_read(tid)
        return super().get_affinity(tid)

    def set_affinity(self, tid: int, cpus: Iterable[int]) -> None:
        """Set it as far as the cpuset allows; EINVAL when that is nothing."""
        self.before_set(tid)
        asked = frozenset(cpus) & self.online
        left = asked & self._cpuset if tid in self.members else asked
        if not left:
            raise OSError(errno.EINVAL, "no CPU left")
        self._asked[tid] = asked
        self.affinities[tid] = left

    def write_cpuset(self, cpus: str) -> None:
        """Write the pod's cpuset, as Kata does, and have every thread follow it."""
        self.begin_cpuset(cpus)
        self.follow_cpuset(self.members)

    def begin_cpuset(self, cpus: str) -> None:
        """Have the file show a cpuset that no thread follows yet."""
        for name in ("cpuset.cpus", "cpuset.cpus.effective"):
            (self._folder / name).write_text(f"{cpus}\n")
        self._cpuset = frozenset(world.cpus(cpus))

    def follow_cpuset(self, tids: Iterable[int]) -> None:
        """Have threads follow the cpuset."""
        for tid in tids:
            asked = self._asked.get(tid, EVERY_CPU)
            self.affinities[tid] = asked & self._cpuset or self._cpuset

    def kata_pins(self, tids: Sequence[int] = VCPUS) -> None:
        """Pin each vCPU to one CPU of the union, as runtime-rs does if there are as many."""
        assert len(tids) == len(self._cpuset), "Kata would not pin"
        for tid, cpu in zip(tids, sorted(self._cpuset), strict=True):
            self.set_affinity(tid, {cpu})


@dataclass
class PlayedNode:
    """The node's facts: 16 CPUs, no kubelet; `offline` are CPUs that are off."""

    cgroup_mounts: tuple[CgroupMount, ...]
    offline: Callable[[], str] = str
    kubelet = None

    def current(self) -> Node:
        """Return them."""
        there = world.without(world.flat(16), self.offline())
        return replace(world.node(there), release_mask=there.online)


class RecordedPod:
    """The recorded pod, and daemons that run passes over it."""

    def __init__(self, folder: Path, *, own_pinning: bool = False) -> None:
        self._folder = folder
        self._registry: Registry | None = None
        self.beside = CpuSet()
        """What other pods have exclusively."""
        self.offline = ""
        tree = folder / "host"
        tree.mkdir()
        host = FakeHost(tree, EVERY_CPU)
        cgroup = tree / f"sys/fs/cgroup{CGROUP}"
        cgroup.mkdir(parents=True)
        self.kernel = PlayedKernel(cgroup)
        for name in ("shim", "virtiofsd-parent", "virtiofsd-child", "qemu"):
            self._process(host, name)
        self.kernel.affinities = dict(host.calls.affinities)
        self.kernel.write_cpuset("0-15")
        (cgroup.parents[2] / "cpuset.cpus.effective").write_text("0-15\n")
        _write(tree / "proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 none rw\n")
        _write(tree / "proc/self/cgroup", "0::/\n")
        self._debugfs(tree / "debug")
        state = json.loads((DATA / "state.json").read_text())
        state["resource"]["cgroup_state"]["enable_vcpus_pinning"] = own_pinning
        _write(tree / f"run/kata/{SANDBOX}/state.json", json.dumps(state))
        self.root = HostRoot(str(tree), debugfs="/debug", calls=self.kernel)
        self.restart()

    def restart(self, *, registry_lost: bool = False) -> None:
        """Start another daemon: of the former one only the registry is left, if that."""
        root, index = self.root, ProcessIndex(self.root)
        self.close()
        if registry_lost:
            (self._folder / "registry.db").unlink()
        registry = self._registry = Registry(str(self._folder / "registry.db"), boot_id="b")
        self.pins = Pins(registry)
        paths = KataPaths(vc="/run/vc", kata="/run/kata")
        host = facts(root, index)
        executables = Executables(("/usr/bin/qemu-system-x86_64",), shims=(_shim(),))
        vmms = AcceptedVmms(registry)
        finder = VmmFinder(host, paths=paths, executables=executables, before=vmms.of)
        node = cast("NodeWatch", PlayedNode(cgroup_mounts(root), lambda: self.offline))
        search = VmmSearch(root, index, finder, vmms, no_survey())
        threads = ThreadFinder(node, host, paths, finder.shims)
        pinning = KataPinningReader(root, paths, BundleReader([]), ())
        self.engine = Engine(
            *(root, node, self.pins, index, threads, search, pinning),
            _beside=lambda _id, _node: self.beside,
        )
        self.cache = SandboxCache()

    def close(self) -> None:
        """End the daemon."""
        if self._registry is not None:
            self._registry.close()

    def run(self, *containers: Container, release: bool = False, act: bool = True) -> Report:
        """Run a pass."""
        found = finish(self.engine.steps(SANDBOX, containers, self.cache, act=act, release=release))
        assert self.cache.vmm is not None, self.cache.problem
        return found

    def hide(self, tids: Iterable[int]) -> Callable[[], None]:
        """Hide processes until what is returned is called."""
        moves = [(f"{self.root.proc(pid)}", f"{self._folder}/{pid}") for pid in tids]
        for there, away in moves:
            os.rename(there, away)

        def show() -> None:
            for there, away in moves:
                os.rename(away, there)

        return show

    def masks(self, tids: Iterable[int]) -> list[str]:
        """Return the affinities of threads as cpu lists."""
        return [str(CpuSet(self.kernel.affinities[tid])) for tid in tids]

    def _process(self, host: FakeHost, name: str) -> None:
        files = DATA / "proc" / name
        stat = (files / "stat").read_text()
        pid, ppid = int(stat.split()[0]), int(stat.rpartition(") ")[2].split()[1])
        for line in (files / "threads.tsv").read_text().splitlines()[1:]:
            tid, comm, _cpus, cgroup, flags = line.split("\t")
            host.thread(pid, int(tid), comm=comm, ppid=ppid, flags=int(flags), cgroup=cgroup)
            self.kernel.members.append(int(tid))
        home = host.folder / "proc" / str(pid)
        shutil.copy(home / "task" / str(pid) / "stat", home / "stat")
        shutil.copy(files / "cgroup", home / "cgroup")
        shutil.copy(files / "cmdline", home / "cmdline")
        (home / "exe").symlink_to((files / "exe").read_text().strip())

    @staticmethod
    def _debugfs(folder: Path) -> None:
        vm, *vcpus = (DATA / "kvm-debugfs.txt").read_text().splitlines()
        for line in vcpus:
            vcpu, pid, *_ = line.split()
            _write(folder / "kvm" / os.path.basename(vm) / vcpu / "pid", pid.removeprefix("pid="))


def app(cpus: str) -> Container:
    """Return the pod's container with exclusive CPUs."""
    return replace(world.exclusive("app", cpus), sandbox_id=SANDBOX)


def log(cpus: str | None) -> Container:
    """Return the pod's container without exclusive CPUs."""
    return replace(world.shared("log", cpus), sandbox_id=SANDBOX)


def _shim() -> str:
    return (DATA / "proc/shim/exe").read_text().strip()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
