"""A double of the files that `quiet: full` writes, for hardware and errors that are not here.

Errors as measured on Linux 6.1 and 6.12 (workqueue mask, RPS, pm_qos) or from their source
(cpufreq: EINVAL for a governor that is not there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from errno import EINVAL, ESRCH
from pathlib import Path

from kata_pin.base.cpuset import CpuSet
from kata_pin.rights.broker.tunables import (
    TUNABLE_FILES,
    TunableWrite,
    TunableWritten,
    check_level,
    parse_writes,
    render_writes,
    write_tunables,
)
from tests.support.irqtree import IrqTree
from tests.support.quiethost import PF_KTHREAD, process

START = 900


class WorkTree(IrqTree):
    """IrqTree with a kernel's own work: a workqueue mask, a watchdog, threads, queues, power."""

    def __init__(self, root: Path, cpus: int) -> None:
        super().__init__(root, cpus)
        self.level = "full"
        everyone = CpuSet(range(cpus))
        self.put("sys/devices/virtual/workqueue/cpumask", everyone.hex_mask())
        self.put("proc/sys/kernel/watchdog_cpumask", str(everyone))
        self.put("sys/devices/system/cpu/online", str(everyone))
        self.put("sys/class/net/eth0/queues/rx-0/rps_cpus", CpuSet({1, 4, 5}).hex_mask())
        self.put("sys/class/net/eth0/queues/rx-1/rps_cpus", "0")
        self.put("sys/class/net/eth0/queues/tx-0/xps_cpus", CpuSet({4}).hex_mask())
        for cpu in range(cpus):
            base = f"sys/devices/system/cpu/cpu{cpu}"
            self.put(f"{base}/power/pm_qos_resume_latency_us", "0")
        for first in range(0, cpus, 2):  # a policy of two pCPUs each
            base = f"sys/devices/system/cpu/cpufreq/policy{first}"
            self.put(f"{base}/related_cpus", f"{first} {first + 1}")
            self.put(f"{base}/scaling_governor", "powersave")
            self.put(f"{base}/scaling_available_governors", "powersave performance")
        self.put("proc/2/task/2/children", "")
        self.threads: dict[int, int] = {}

    def put(self, path: str, text: str) -> None:
        """Somebody writes a file."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def get(self, path: str) -> str:
        """Return what a file has."""
        return (self.root / path).read_text().strip()

    @property
    def kinds(self) -> set[str]:
        """Return every kind that may be written."""
        return set(TUNABLE_FILES)

    def files(self) -> Mapping[str, str]:
        """Return what every file has in which something may be written, but for masks."""
        trees = (self.root / tree for tree in ("sys", "proc/sys"))
        found = (path for tree in trees for path in tree.rglob("*") if path.is_file())
        return {str(path): path.read_text() for path in found if "cpu" not in path.name}

    def add_thread(self, tid: int, comm: str, cpus: str, *, refuses: int = 0) -> None:
        """A kernel thread appears."""
        self.threads[tid] = refuses
        for path, text in process(tid, comm, ppid=2, flags=PF_KTHREAD, cpus=cpus).items():
            self.put(path, text.replace(" 20 0 1 0 9 ", f" 20 0 1 0 {START} "))
        self.put("proc/2/task/2/children", " ".join(map(str, self.threads)))

    def end_thread(self, tid: int) -> None:
        """It ends."""
        del self.threads[tid]
        (self.root / f"proc/{tid}/stat").unlink()
        self.put("proc/2/task/2/children", " ".join(map(str, self.threads)))

    def affinity(self, tid: int) -> str:
        """Return its affinity."""
        return self.get(f"proc/{tid}/status").rpartition("\t")[2]

    def write_tunables(self, writes: Sequence[TunableWrite], root: str) -> list[TunableWritten]:
        """Write as the kernel would, after the broker's own checks."""
        check_level(writes, self.level)
        ours = {"interrupt", "default-mask"}
        return [
            answer
            for one in parse_writes(render_writes(writes))
            for answer in (
                IrqTree.write_tunables(self, [one], root) if one.kind in ours else [self._work(one)]
            )
        ]

    def _work(self, one: TunableWrite) -> TunableWritten:
        self.writes.append(one)
        errno = self.fails.pop(f"{one.kind} {one.name}".rstrip(), 0)
        if one.kind == "kernel-thread":
            tid, _, start = one.name.partition(":")
            if int(tid) not in self.threads or int(start) != START:
                return TunableWritten(ESRCH)
            errno = errno or self.threads[int(tid)]
            if not errno:
                comm = self.get(f"proc/{tid}/stat").partition("(")[2].partition(")")[0]
                self.put(f"proc/{tid}/status", f"Name:\t{comm}\nCpus_allowed_list:\t{one.value}")
            return TunableWritten(errno, self.affinity(int(tid)))
        if one.kind == "workqueues" and not int(one.value.replace(",", ""), 16):
            errno = errno or EINVAL
        path = TUNABLE_FILES[one.kind].path.format(*one.name.split("/"))
        if errno:
            return TunableWritten(errno, self.get(path.lstrip("/")))
        if (self.root / path.lstrip("/")).exists():
            self.put(path.lstrip("/"), "")  # sysfs has no rest of a longer value
        (written,) = write_tunables([one], str(self.root))
        return written
