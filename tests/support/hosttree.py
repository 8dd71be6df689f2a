"""Small trees of /proc and /sys on disk, and calls to go with them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from kata_pin.linux.files import HostRoot
from kata_pin.rights.calls import Calls

SYSFS: Final = Path(__file__).parent.parent / "data" / "sysfs"


def listing(name: str) -> dict[str, str]:
    """Return the files of a captured or written tree of tests/data/sysfs."""
    return parse_listing((SYSFS / f"{name}.tree").read_text())


def parse_listing(text: str) -> dict[str, str]:
    """Return the files that a listing has, one `path<TAB>content` a line."""
    files = (line.partition("\t") for line in text.splitlines())
    return {path: content for path, _, content in files}


def grow(folder: Path, files: Mapping[str, str]) -> HostRoot:
    """Write the files below a folder, a newline after each as in sysfs; return its root."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return HostRoot(str(folder))


class FakeCalls(Calls):
    """Affinities in memory, with the errors of the kernel.

    `cpusets` limits what a tid may use; `refuse` gives an errno for a tid; `before_set` runs just
    before an affinity is stored, so that a thread may die or change at the worst moment.
    """

    def __init__(self, online: Iterable[int] = range(4)) -> None:
        self.online = frozenset(online)
        self.affinities: dict[int, frozenset[int]] = {}
        self.cpusets: dict[int, frozenset[int]] = {}
        self.refuse: dict[int, int] = {}
        self.before_set: Callable[[int], None] = lambda _: None

    def get_affinity(self, tid: int) -> set[int]:
        """Return the thread's affinity; ESRCH when there is no such thread."""
        return set(self._existing(tid))

    def set_affinity(self, tid: int, cpus: Iterable[int]) -> None:
        """Store what the cpuset leaves of it; EINVAL when that is nothing."""
        self._existing(tid)
        self.before_set(tid)
        if tid in self.refuse:
            raise OSError(self.refuse[tid], os.strerror(self.refuse[tid]))
        left = frozenset(cpus) & self.cpusets.get(tid, self.online) & self.online
        if not left:
            raise OSError(errno.EINVAL, "no CPU left")
        self.affinities[tid] = left

    def _existing(self, tid: int) -> frozenset[int]:
        if tid not in self.affinities:
            raise ProcessLookupError(errno.ESRCH, "no such thread")
        return self.affinities[tid]


class FakeHost:
    """A tree whose processes a test makes and removes; `root` is what the code is given."""

    def __init__(self, folder: Path, online: Iterable[int] = range(4)) -> None:
        self.calls = FakeCalls(online)
        self.folder = folder
        self.root = HostRoot(str(folder), calls=self.calls)
        (folder / "proc").mkdir()

    def process(
        self,
        pid: int,
        *,
        ppid: int = 1,
        comm: str = "python",
        threads: int = 1,
        flags: int = 0x0040_0000,
        state: str = "S",
        starttime: int = 100,
        cgroup: str = "0::/",
    ) -> None:
        """Make a process whose threads are numbered from its pid upwards."""
        home = self.folder / "proc" / str(pid)
        for tid in range(pid, pid + threads):
            self.thread(
                pid,
                tid,
                comm=comm,
                ppid=ppid,
                flags=flags,
                state=state,
                starttime=starttime,
                cgroup=cgroup,
            )
        shutil.copy(home / "task" / str(pid) / "stat", home / "stat")
        (home / "cgroup").write_text(f"{cgroup}\n")
        (home / "cmdline").write_bytes(f"{comm}\0--id\0x\0".encode())
        (home / "exe").symlink_to(f"/usr/bin/{comm}")

    def thread(
        self,
        tgid: int,
        tid: int,
        *,
        comm: str = "python",
        ppid: int = 1,
        flags: int = 0x0040_0000,
        state: str = "S",
        starttime: int = 100,
        cgroup: str = "0::/",
    ) -> None:
        """Make one thread, or another one with the same tid."""
        folder = self.folder / "proc" / str(tgid) / "task" / str(tid)
        folder.mkdir(parents=True, exist_ok=True)
        zeros = " 0" * 3
        text = (
            f"{tid} ({comm}) {state} {ppid} 1 1 0 -1 {flags}{' 0' * 4} 7 5 0 0 20 0 1 0 {starttime}"
        )
        (folder / "stat").write_text(f"{text}{' 0' * 16} 2{' 0' * 4} 0{zeros}{' 0' * 5}\n")
        (folder / "cgroup").write_text(f"{cgroup}\n")
        self.calls.affinities[tid] = self.calls.online

    def end(self, pid: int) -> None:
        """Remove a process and all its threads."""
        home = self.folder / "proc" / str(pid)
        for name in os.listdir(home / "task"):
            self.calls.affinities.pop(int(name), None)
        shutil.rmtree(home)

    def end_thread(self, tgid: int, tid: int) -> None:
        """Remove one thread."""
        shutil.rmtree(self.folder / "proc" / str(tgid) / "task" / str(tid))
        del self.calls.affinities[tid]
