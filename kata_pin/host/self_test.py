"""Do pins survive a change of the cpuset on this kernel? Tried, not guessed from its version.

Linux before 6.2 forgets an affinity whenever the cgroup's cpuset changes; later kernels, and
distributions that took the change back, keep it (commit 8f9ea86fdf99). The test makes a cgroup of
its own with one process of its own, and removes both. Killed halfway, the process ends by itself
(its input closes) and the empty cgroup is removed by the next run. No other task is touched and no
existing cgroup is written (D7). Blocks for some milliseconds.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kata_pin.errors import HostError, KataPinError, reason_of
from kata_pin.host.cgroup_mounts import CgroupMount, cgroup_mounts
from kata_pin.host.files import read_text
from kata_pin.host.root import HostRoot
from kata_pin.host.topology import online
from kata_pin.model.cpuset import CpuSet

PREFIX: Final = "kata-pin-selftest-"
"""Names of our cgroups begin with it; the pid of their maker follows."""

REMOVE_S: Final = 1.0
"""How long a cgroup may stay busy after its last process was reaped."""


class Sticking(StrEnum):
    """What becomes of a pin when the cpuset changes."""

    STICK = "stick"
    LOST = "lost"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PinsStick:
    """The answer, and what it rests on (or what was in the way)."""

    answer: Sticking
    reason: str


def pins_stick(root: HostRoot) -> PinsStick:
    """Try it; UNKNOWN with the reason where it cannot be tried. Never raises."""
    if not root.live:
        return PinsStick(Sticking.UNKNOWN, "not the running system")
    try:
        mount = _usable_mount(root)
        with _cgroup(root, mount) as folder:
            return _try(root, folder, mount)
    except (OSError, KataPinError) as error:
        return PinsStick(Sticking.UNKNOWN, reason_of(error))


def _usable_mount(root: HostRoot) -> CgroupMount:
    """Return a hierarchy in which a new cgroup has a cpuset of its own.

    On v2 the controller must already be handed on: to hand it on wipes the pins of all tasks.
    """
    mounts = cgroup_mounts(root)
    for mount in mounts:
        if mount.v1:
            return mount
        with suppress(OSError):
            if "cpuset" in read_text(f"{mount.point}/cgroup.subtree_control").split():
                return mount
    missing = "the cpuset controller is not handed on" if mounts else "no cgroups are mounted"
    raise KataPinError(missing)


@contextmanager
def _cgroup(root: HostRoot, mount: CgroupMount) -> Iterator[str]:
    _sweep(root, mount.point)
    folder = f"{mount.point}/{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    os.mkdir(folder)
    try:
        yield folder
    finally:
        _remove(folder)


def _try(root: HostRoot, folder: str, mount: CgroupMount) -> PinsStick:
    allowed = CpuSet.parse(read_text(f"{mount.point}/{_effective(mount, 'cpus')}")) & online(root)
    if len(allowed) < 2:
        return PinsStick(Sticking.UNKNOWN, "needs two CPUs")
    pinned, wide = CpuSet(list(allowed)[1:2]), CpuSet(list(allowed)[:2])
    _write(folder, "cpuset.mems", read_text(f"{mount.point}/{_effective(mount, 'mems')}"))
    _write(folder, "cpuset.cpus", str(wide))
    with _bystander() as pid:
        _write(folder, "cgroup.procs", str(pid))
        os.sched_setaffinity(pid, pinned)
        _write(folder, "cpuset.cpus", str(pinned))
        _write(folder, "cpuset.cpus", str(wide))
        after = CpuSet(root.calls.get_affinity(pid))
    if after == pinned:
        return PinsStick(Sticking.STICK, f"a pin to {pinned} outlived a change of its cpuset")
    return PinsStick(Sticking.LOST, f"a pin to {pinned} became {after} when its cpuset changed")


def _effective(mount: CgroupMount, what: str) -> str:
    return f"cpuset.effective_{what}" if mount.v1 else f"cpuset.{what}.effective"


@contextmanager
def _bystander() -> Iterator[int]:
    """Run a process that ends when its input does, so also when we are killed.

    It is our interpreter: the container image has no other program.
    """
    command = [sys.executable, "-ISc", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, close_fds=True) as child:
        try:
            yield child.pid
        finally:
            child.kill()


def _write(folder: str, name: str, text: str) -> None:
    path = f"{folder}/{name}"
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise HostError("write", path, error.errno or 0) from error
    finally:
        os.close(fd)


def _sweep(root: HostRoot, point: str) -> None:
    """Remove what a killed run left; a cgroup in use refuses to go."""
    for name in os.listdir(point):
        maker = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and not os.path.exists(root.proc(maker)):
            with suppress(OSError):
                os.rmdir(f"{point}/{name}")


def _remove(folder: str) -> None:
    deadline = time.monotonic() + REMOVE_S
    while True:
        try:
            os.rmdir(folder)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return
