"""A double of resctrl's tree with the kernel's own errors: no machine of ours has the hardware.

No contract compares it with a kernel. Rules and errors were read in Linux 6.12,
arch/x86/kernel/cpu/resctrl/rdtgroup.c and monitor.c: a group is made by mkdir with its files and
takes a RMID (ENOSPC without one) and, outside mon_groups, a CLOSID; a thread is in one group; it
enters a monitoring group from its control group only (EINVAL, the reason in info/last_cmd_status);
a group that is removed leaves its threads to the one around.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kata_pin.rights.broker.protocol import AffinityChange, Changed
from kata_pin.rights.broker.tunables import KernelFiles, ResctrlGroups
from tests.support.hosttree import FakeCalls
from tests.support.world import VMM_PID

_NO_CLASSES: Mapping[str, str] = MappingProxyType({})
_COUNTERS = ("llc_occupancy", "mbm_total_bytes", "mbm_local_bytes")


class ResctrlTree(KernelFiles):
    """The file system at `<root>/sys/fs/resctrl`, with two caches; `alive` are all threads."""

    def __init__(self, root: Path, *, rmids: int = 8, closids: int = 4) -> None:
        self.top = root / "sys/fs/resctrl"
        self.rmids, self.closids = rmids - 1, closids - 1
        self.alive: set[int] = set()
        self.home: dict[int, Path] = {}
        self.calls: list[tuple[str, str]] = []
        (self.top / "info/L3_MON").mkdir(parents=True)
        self._grow(self.top, "L3:0=fff;1=fff\n")
        (self.top / "mon_groups").mkdir()
        self._say("ok")

    def spawn(self, *tids: int, of: int = 0) -> None:
        """Start threads; they inherit the group of their creator."""
        for tid in tids:
            task = self.top.parents[2] / f"proc/{VMM_PID}/task/{tid}"
            task.mkdir(parents=True, exist_ok=True)
            (task / "stat").write_text(f"{tid} (CPU) S {'0 ' * 18}5 0\n")
        self.inherit(*tids, of=of)

    def inherit(self, *tids: int, of: int = 0) -> None:
        """Have threads that are in /proc already in the group of their creator."""
        self.alive |= set(tids)
        self.home |= dict.fromkeys(tids, self.home.get(of, self.top))
        self._show()

    def count(self, group: str, name: str, *values: str) -> None:
        """Set a counter of a group in each cache."""
        for domain, value in zip(("mon_L3_00", "mon_L3_01"), values, strict=True):
            (self.top / group / "mon_data" / domain / name).write_text(f"{value}\n")

    def members(self, group: str) -> set[int]:
        """Return the threads of a group."""
        return {tid for tid, home in self.home.items() if home == self.top / group}

    def mkdir(self, path: str) -> None:
        """Make a group."""
        self.calls.append(("mkdir", path))
        folder = Path(path)
        if folder.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        is_control = folder.parent == self.top
        if not self.rmids or (is_control and not self.closids):
            self._refuse(errno.ENOSPC, "Out of RMIDs" if not self.rmids else "Out of CLOSIDs")
        if not folder.parent.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self.rmids -= 1
        self.closids -= is_control
        self._grow(folder, "L3:0=fff;1=fff\n" if is_control else "")
        if is_control:
            (folder / "mon_groups").mkdir()
        self._say("ok")

    def rmdir(self, path: str) -> None:
        """Remove a group, and those in it."""
        self.calls.append(("rmdir", path))
        folder = Path(path)
        if not folder.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        is_control = folder.parent == self.top
        around = self.top if is_control else folder.parent.parent
        for tid, home in self.home.items():
            if home == folder or folder in home.parents:
                self.home[tid] = around
        self.rmids += 1 + len(list(folder.glob("mon_groups/*")))
        self.closids += is_control
        shutil.rmtree(folder)
        self._show()

    def write(self, path: str, text: str) -> None:
        """Write a schemata line, or the tid of a thread that joins a group."""
        self.calls.append(("write", path))
        file = Path(path)
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if file.name == "schemata":
            self._limit(file, text)
        else:
            self._join(file.parent, int(text))
        self._say("ok")

    def _limit(self, file: Path, text: str) -> None:
        if not re.fullmatch(r"L3:0=[0-9a-f]+(;1=[0-9a-f]+)?\n", text):
            self._refuse(errno.EINVAL, f"Unknown or unsupported resource name '{text[:2]}'")
        if any(
            not int(mask, 16) or int(mask, 16) > 0xFFF for mask in re.findall("=([0-9a-f]+)", text)
        ):
            self._refuse(errno.EINVAL, "Mask out of range")
        file.write_text(text)

    def _join(self, group: Path, tid: int) -> None:
        if tid not in self.alive:
            self._refuse(errno.ESRCH, f"No task {tid}")
        monitors = group.parent.name == "mon_groups"
        control = group.parent.parent if monitors else group
        if monitors and self._control_of(tid) != control:
            self._refuse(errno.EINVAL, "Can't move task to different control group")
        self.home[tid] = group
        self._show()

    def _control_of(self, tid: int) -> Path:
        home = self.home[tid]
        return home.parent.parent if home.parent.name == "mon_groups" else home

    def _grow(self, folder: Path, schemata: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "tasks").write_text("")
        if schemata:
            (folder / "schemata").write_text(schemata)
        for domain in ("mon_L3_00", "mon_L3_01"):
            (folder / "mon_data" / domain).mkdir(parents=True)
            for name in _COUNTERS:
                (folder / "mon_data" / domain / name).write_text("0\n")

    def _show(self) -> None:
        for file in self.top.rglob("tasks"):
            tids = sorted(tid for tid, home in self.home.items() if home == file.parent)
            file.write_text("".join(f"{tid}\n" for tid in tids))

    def _say(self, text: str) -> None:
        (self.top / "info/last_cmd_status").write_text(f"{text}\n")

    def _refuse(self, number: int, text: str) -> None:
        self._say(text)
        raise OSError(number, os.strerror(number))


class ResctrlCalls(FakeCalls):
    """Calls that reach such a tree; stat files of its threads are below `<root>/proc`."""

    def __init__(
        self, tree: ResctrlTree, classes: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.resctrl = ResctrlGroups(
            classes, str(tree.top), tree, str(tree.top.parents[2] / "proc")
        )

    def make_group(self, class_name: str, name: str) -> None:
        """See Calls."""
        self.resctrl.make(class_name, name)

    def join_group(
        self, class_name: str, name: str, threads: Sequence[AffinityChange]
    ) -> list[Changed]:
        """See Calls."""
        return self.resctrl.join(class_name, name, threads)

    def remove_group(self, class_name: str, name: str) -> None:
        """See Calls."""
        self.resctrl.remove(class_name, name)
