"""Other programs that decide where interrupts and tasks run: irqbalance, tuned, CRI-O, partitions.

Facts: irqbalance(1) and its ui socket; tuned-profiles (scheduler plugin, isolated_cores); CRI-O's
internal/runtimehandlerhooks; cgroup-v2.rst (cpuset.cpus.partition).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.host.files import read_bytes
from kata_pin.host.quiet.reading import cpu_list, known, text, unreadable
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.quiet.node import Crio, Irqbalance, Partition, Tuned, Unknown
from kata_pin.wire.kernel.irqbalance import MAX_BYTES, parse_setup

MAX_CGROUPS: Final = 4096
"""Most cgroups that are looked at, the uppermost first."""

MAX_DEPTH: Final = 5
MAX_INCLUDES: Final = 8
ANSWER_S: Final = 1.0
"""Longest wait for irqbalance, which answers between two of its rounds."""

MAX_FILES: Final = 64

_BANS: Final = ("IRQBALANCE_BANNED_CPUS", "IRQBALANCE_BANNED_CPULIST")
_PROFILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")
_INCLUDE: Final = re.compile(r"^\s*include\s*=\s*(\S+)", re.MULTILINE)
_ISOLATED: Final = re.compile(r"^\s*isolated_cores\s*=\s*\S", re.MULTILINE)
_HOOKS: Final = re.compile(
    r'^[^#\n]*(?:"irq-load-balancing\.crio\.io"|runtimes\.[^\]\n]*high-performance)', re.MULTILINE
)

Names = Mapping[int, str]
"""The names of processes by pid."""


def read_irqbalance(root: HostRoot, names: Names) -> Irqbalance | Unknown | None:
    """Return the running irqbalance, None if there is none; never raises."""
    pid = _pid_of(root, "irqbalance", names)
    if pid is None or isinstance(pid, Unknown):
        return pid
    return Irqbalance(pid, known(root.proc(pid, "environ"), _bans), _banned(root, pid))


def _banned(root: HostRoot, pid: int) -> CpuSet | Unknown:
    """Return the pCPUs that irqbalance keeps clear, as it answers root on its socket."""
    answer = b""
    try:
        with root.calls.ask_irqbalance(pid, None) as end:
            end.settimeout(ANSWER_S)
            while b"BANNED" not in answer and len(answer) < MAX_BYTES:
                more = end.recv(MAX_BYTES)
                if not more:
                    break
                answer += more
        return parse_setup(answer).banned
    except OSError as error:
        return unreadable(f"/run/irqbalance/irqbalance{pid}.sock", error)
    except ParseError as error:
        return Unknown(error.message)


def _bans(data: bytes) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in text(data).split("\0"))
    return {name: value for name, _, value in pairs if name in _BANS}


def read_tuned(root: HostRoot, names: Names) -> Tuned | Unknown | None:
    """Return the running tuned, None if there is none; never raises."""
    pid = _pid_of(root, "tuned", names)
    if pid is None or isinstance(pid, Unknown):
        return pid
    profile = known(root.path("/etc/tuned/active_profile"), text)
    words = [] if isinstance(profile, Unknown) else profile.split()
    return Tuned(pid, profile, any(_isolates(root, word) for word in words))


def _isolates(root: HostRoot, profile: str) -> bool:
    """Return whether a profile, or one that it includes, names isolated cores."""
    for _ in range(MAX_INCLUDES):
        if not _PROFILE.match(profile):
            return False
        found = next(_profile_texts(root, profile), "")
        if _ISOLATED.search(found):
            return True
        included = _INCLUDE.search(found)
        if included is None:
            return False
        profile = included[1]
    return False


def _profile_texts(root: HostRoot, profile: str) -> Iterator[str]:
    for folder in (
        "/etc/tuned",
        "/etc/tuned/profiles",
        "/usr/lib/tuned",
        "/usr/lib/tuned/profiles",
    ):
        found = known(root.path(f"{folder}/{profile}/tuned.conf"), text)
        if not isinstance(found, Unknown):
            yield found


def read_crio(root: HostRoot, names: Names) -> Crio | Unknown | None:
    """Return the running CRI-O, None if there is none; never raises."""
    pid = _pid_of(root, "crio", names)
    if pid is None or isinstance(pid, Unknown):
        return pid
    files = [root.path("/etc/crio/crio.conf")]
    folder = root.path("/etc/crio/crio.conf.d")
    try:
        files += [f"{folder}/{name}" for name in sorted(os.listdir(folder))[:MAX_FILES]]
    except FileNotFoundError:
        pass
    except OSError as error:
        return Crio(pid, unreadable(folder, error))
    found = []
    for file in files:
        content = known(file, text)
        if isinstance(content, Unknown):
            if not content.absent:
                return Crio(pid, content)
        elif _HOOKS.search(content):
            found.append(file)
    return Crio(pid, tuple(found))


def _pid_of(root: HostRoot, name: str, names: Names) -> int | Unknown | None:
    """Return the process of root with this name; anybody may choose a name."""
    if 1 not in names:
        return Unknown("the processes of others cannot be seen (hidepid)")
    found = (pid for pid, comm in names.items() if comm == name)
    return next((pid for pid in found if _of_root(root, pid)), None)


def _of_root(root: HostRoot, pid: int) -> bool:
    try:
        return os.stat(root.proc(pid)).st_uid == 0 or not root.live
    except OSError:
        return False


def read_partitions(root: HostRoot) -> tuple[Partition, ...] | Unknown:
    """Return cgroups with a partition of pCPUs, valid or not; never raises."""
    base = root.sys("fs/cgroup")
    if not os.path.exists(f"{base}/cgroup.controllers"):
        return Unknown(f"{base} is not cgroup v2", absent=True)
    found = []
    for folder in islice(_folders(base), MAX_CGROUPS):
        try:
            state = text(read_bytes(f"{folder}/cpuset.cpus.partition"))
        except OSError:  # the cpuset controller is off there, or the cgroup is gone
            continue
        if state != "member":
            cpus = cpu_list(f"{folder}/cpuset.cpus.effective")
            if not isinstance(cpus, Unknown):
                found.append(Partition(folder.removeprefix(base), state, cpus))
    return tuple(found)


def _folders(base: str) -> Iterator[str]:
    """Yield the cgroups below the root, level by level."""
    level = [base]
    for _ in range(MAX_DEPTH):
        below = []
        for folder in level:
            try:
                with os.scandir(folder) as entries:
                    below += [one.path for one in entries if one.is_dir(follow_symlinks=False)]
            except OSError:
                continue
        yield from below
        level = below[:MAX_CGROUPS]
