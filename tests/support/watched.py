"""Folders laid out as Kata and the kubelet do, watched by the real inotify, and what it holds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

from kata_pin.follow.files import FileChanges, StateWatch


class World:
    """The folders that are watched, and what was told of them."""

    def __init__(self, root: Path) -> None:
        self.sbs = root / "vc/sbs"
        self.kata = root / "kata"
        self.kubelet = root / "kubelet/cpu_manager_state"
        self.cgroups = root / "cgroup"
        self.claims = root / "cdi"
        self.watch = StateWatch(
            vc=str(root / "vc"),
            kata=str(self.kata),
            kubelet=str(self.kubelet),
            claims=str(self.claims),
        )
        self._changes: AsyncIterator[FileChanges] | None = None

    def make(self) -> None:
        """Make the folders as they are on a node."""
        for folder in (self.sbs, self.kata, self.kubelet.parent, self.cgroups, self.claims):
            folder.mkdir(parents=True, exist_ok=True)

    def sandbox(self, name: str, text: str = "{}") -> Path:
        """Write a sandbox's persist.json as Kata does: in place."""
        path = self.sbs / name / "persist.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def cgroup(self, name: str) -> Path:
        """Make what looks like a cgroup."""
        folder = self.cgroups / name
        folder.mkdir()
        (folder / "cpuset.cpus").write_text("0-3")
        return folder

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch until the end of the block; the first thing told is `everything`."""
        async with asyncio.timeout(50), aclosing(self.watch.changes()) as changes:
            self._changes = changes
            assert (await anext(changes)).everything
            yield

    async def told(self) -> FileChanges:
        """Return what is told next."""
        assert self._changes is not None
        return await anext(self._changes)

    async def told_of(self, sandbox_id: str) -> None:
        """Wait until a sandbox's state is told of."""
        while sandbox_id not in (await self.told()).sandboxes:
            pass

    async def nothing(self) -> None:
        """Fail if anything is told before a sandbox that is written now."""
        self.sandbox("sentinel")
        assert (await self.told()).sandboxes == {"sentinel"}


def descriptors() -> int:
    """Return how many inotify instances this process has; others' descriptors come and go."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:inotify"
    return found


def kernel_watches() -> int:
    """Return how many watches the kernel holds for this process's inotify instances."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            text = Path(f"/proc/self/fdinfo/{fd}").read_text()
        except OSError:
            continue
        found += text.count("inotify wd:")
    return found
