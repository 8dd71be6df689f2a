"""Which processes may be the VMM of a sandbox, its shim, and what confirms them (D5, D24)."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from errno import EACCES, ESTALE
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec import Struct

from kata_pin.base.errors import HostError, NotRead, ParseError, reason_of
from kata_pin.base.sandbox import Process, ProcessKey
from kata_pin.base.steps import Steps
from kata_pin.linux.cgroups import why_not_roots
from kata_pin.peers.vmm_cmdline import FIRECRACKER_ID, VmmCommand, parse_shim
from kata_pin.vmm import checks
from kata_pin.vmm.checks import DEFAULT_SHIMS, Allowlist, VmmAllowlist, VmmRefused
from kata_pin.vmm.kinds import VmmKind
from kata_pin.vmm.state_files import (
    HostAccess,
    KataPaths,
    digest,
    read_jailed_pids,
    read_pids,
)

FILE_SERVERS: Final = ("virtiofsd", "nydusd")

AT_ONCE: Final = 16
"""Processes whose programs are asked for by one request. They are looked at before anything else
runs: meanwhile one may execute another program, and another look may have found its claim."""


def is_file_server(exe: str) -> bool:
    """Whether a path is that of a program which serves a sandbox's shared file system."""
    return os.path.basename(exe).startswith(FILE_SERVERS)


class VmmClaim(Struct, frozen=True):
    """What a process says: the sandbox it names."""

    process: Process
    named: VmmCommand


@dataclass
class VmmClaims:
    """Which processes say that they are a sandbox's VMM: a look at each process, once.

    A claim proves nothing (find.py asks for a witness), and anybody can make one, so all that
    is done for it is cheap, cheapest first, and kept by the process's identity: is it a kernel
    thread, does root run it or its parent (as a shim would be), is its executable's path on the
    list, is it in the host's namespaces, whom does its `-name` name. Of a stranger nothing else
    is read: only a hook or a file can confirm it, and they name its pid. A process is looked at
    again while it is young, and when its name (exec changes it) or its parent changed.

    One lives as long as its finder.

    `unread` are the processes whose command lines could not be read yet; they are looked at
    again.
    """

    _host: HostAccess
    _allowed: VmmAllowlist
    _shims: Allowlist
    unread: dict[ProcessKey, Process] = field(default_factory=dict)
    _seen: dict[ProcessKey, tuple[str, int]] = field(default_factory=dict)
    _claims: dict[ProcessKey, VmmClaim] = field(default_factory=dict)
    _by_name: dict[str, dict[ProcessKey, VmmClaim]] = field(default_factory=dict)

    def look(self) -> Steps[None]:
        """Look at processes that are new, young or renamed; yields after some of them."""
        processes = {one.key: one for one in self._host.processes.all()}
        self._forget(processes.keys())
        trusted: list[Process] = []
        for key, process in processes.items():
            if self._seen.get(key) != (process.comm, process.ppid):
                if process.kernel or not self._is_trusted(process):  # stays so until it execs
                    self._drop(key)
                    self._seen[key] = process.comm, process.ppid
                else:
                    trusted.append(process)
                yield
        for at in range(0, len(trusted), AT_ONCE):
            several = trusted[at : at + AT_ONCE]
            paths = self._host.exe_paths([process.pid for process in several])
            for process, path in zip(several, paths, strict=True):
                self._look_at(process, path)
            yield

    def of(self, sandbox_id: str) -> Sequence[VmmClaim]:
        """Return the claims that name a sandbox, as of the last look."""
        found = {**self._by_name.get(sandbox_id, {})}
        found |= self._by_name.get(sandbox_id[:FIRECRACKER_ID], {})
        return [claim for claim in found.values() if claim.named.names(sandbox_id)]

    def all(self) -> Sequence[VmmClaim]:
        """Return every claim."""
        return list(self._claims.values())

    def may_serve(self, pid: int) -> bool:
        """Whether a process that was just started may be a VMM or a file server.

        By its name and who runs it.
        """
        try:
            process = self._host.read_process(pid)
        except HostError:
            return False
        named = self._allowed.may_run_in(process.comm) or is_file_server(process.comm)
        return named and self._is_trusted(process)

    def _look_at(self, process: Process, path: str) -> None:
        self._drop(process.key)
        try:
            claim = self._claim_of(process, path)
        except NotRead:
            self.unread[process.key] = process
            return
        except (HostError, ParseError, VmmRefused):
            claim = None
        if claim is not None:
            self._claims[process.key] = claim
            self._by_name.setdefault(claim.named.sandbox_id, {})[process.key] = claim
        if not checks.is_young(process):
            self._seen[process.key] = process.comm, process.ppid

    def _claim_of(self, process: Process, path: str) -> VmmClaim | None:
        kind = self._allowed.kind_of(path)
        if kind is None:
            if self._shims.holds(path) or is_file_server(path):
                self._host.cmdline(process.pid)  # a pass will want it
            return None
        status = checks.read_status(self._host.root, process.pid)
        checks.check_namespaces(self._host.root, process.pid, status)
        named = kind.read_name(self._host.cmdline(process.pid))
        return VmmClaim(process, named) if named.sandbox_id else None

    def _is_trusted(self, process: Process) -> bool:
        """Whether root runs a process by every uid, or its parent: a shim's VMM may be rootless."""
        return any(
            checks.is_roots(self._host.root, checks.read_status(self._host.root, pid))
            for pid in (process.pid, process.ppid)
            if pid > 1
        )

    def _forget(self, alive: Container[ProcessKey]) -> None:
        """Drop what is known of processes that have ended."""
        for key in [key for key in self._seen if key not in alive]:
            del self._seen[key]
        for key in [key for key in (*self._claims, *self.unread) if key not in alive]:
            self._drop(key)

    def _drop(self, key: ProcessKey) -> None:
        self.unread.pop(key, None)
        claim = self._claims.pop(key, None)
        if claim is not None:
            named = self._by_name[claim.named.sandbox_id]
            del named[key]
            if not named:
                del self._by_name[claim.named.sandbox_id]


# Firecracker in a jail of Kata's (D24).
#
# Its jailer copies the program into a folder that is named after the sandbox, and makes that folder
# the root of the process, in a mount namespace of its own: the executable reads as `/firecracker`,
# which is no file of the host. What counts is that root and executable are the very folder and file
# of the sandbox's jail, and that only root may write there.

_REASONS: Final = {
    EACCES: "others than root may write there",
    ESTALE: "its root is another folder, or it runs another file",
}


def jail_of(
    host: HostAccess, allowed: VmmAllowlist, paths: KataPaths, sandbox_id: str, pid: int
) -> str:
    """Return the sandbox's jail that a process runs in; raises VmmRefused, and as `exe_file` does.

    In a captured tree only the folder's existence can be looked at.
    """
    exe, root = host.exe_file(pid), host.root
    name = os.path.basename(exe.path)
    jails = [os.path.join(base, *parts) for base, parts in paths.jails(name, sandbox_id)]
    if exe.deleted or not allowed.may_be_jailed(exe.path):
        raise VmmRefused(f"its executable {exe.path} changed during the check, or was deleted")
    if root.live:
        allowed.check_owner(exe)
    doubts = []
    for jail in jails:
        try:
            if root.live:
                root.calls.verify_jail(pid, jail)
            else:
                root.calls.stat(root.path(jail))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            why = _REASONS.get(error.errno or 0) or reason_of(error)
            doubts.append(f"it is not in the sandbox's jail {jail}: {why}")
        else:
            return jail
    raise VmmRefused("; ".join(doubts) or f"it runs {exe.path} in no jail of the sandbox's")


# The shim of a sandbox: the process of Kata's runtime that started the VMM and holds its QMP.
#
# A shim is believed when root runs it by every uid (a setuid program shows the caller's), when its
# executable is an allowed one (`shims`), and its command line has `-id <sandbox>` (containerd's
# shim protocol). A VMM without a living shim is an orphan: Kata's shim panics and leaves QEMU
# behind (seen with 3.21, enable_vcpus_pinning). Kata 1.x starts QEMU with -daemonize, so its parent
# is pid 1 although a shim lives: shims are searched among all processes.

SHIM_COMMS: Final = frozenset({"containerd-shim", "containerd-shi", "kata-shim", "kata-runtime"})
"""Names of shim processes, cut at 15 characters by the kernel: they narrow the search only."""


class Shims:
    """Knows which processes are shims of which sandbox; a shim stays the shim of its sandbox.

    Refusals are not remembered, nor what a young process is: one that a shim has just forked is a
    shim until its exec.
    `executables` are paths, whose last part may be a pattern.
    """

    def __init__(self, host: HostAccess, executables: Iterable[str] = DEFAULT_SHIMS) -> None:
        self._host = host
        self.allowed = Allowlist(host.root, executables, setting="shims")
        self._known: dict[ProcessKey, str] = {}

    def forget_ended(self, alive: Container[ProcessKey]) -> None:
        """Forget all processes but these."""
        self._known = {key: named for key, named in self._known.items() if key in alive}

    def of(self, vmm: Process, sandbox_id: str) -> int | None:
        """Return the pid of the sandbox's living shim, None when there is none."""
        parent = self._host.processes.get(vmm.ppid)
        may_be = parent is None or self.allowed.may_run_in(parent.comm)
        if may_be and self.is_shim_of(vmm.ppid, sandbox_id):
            return vmm.ppid
        for process in self._host.processes.all():
            if process.comm in SHIM_COMMS and self.is_shim_of(process.pid, sandbox_id):
                return process.pid
        return None

    def sandboxes(self) -> set[str]:
        """Return the sandboxes that have a living shim, as far as processes were read."""
        found = set()
        for process in self._host.processes.all():
            if process.comm in SHIM_COMMS:
                with suppress(HostError, ParseError, VmmRefused):
                    found.add(self._sandbox_of(process))
        return found

    def is_shim_of(self, pid: int, sandbox_id: str) -> bool:
        """Whether a process is the sandbox's shim."""
        return not self.why_not(pid, sandbox_id)

    def why_not(self, pid: int, sandbox_id: str) -> str:
        """Return why a process is not the sandbox's shim; empty where it is."""
        if pid <= 1:
            return "it is init"
        try:
            process = self._host.processes.get(pid) or self._host.read_process(pid)
            named = self._sandbox_of(process)
        except (HostError, ParseError, VmmRefused) as error:
            return str(error)
        return "" if named == sandbox_id else f"it is the shim of {named}"

    def _sandbox_of(self, process: Process) -> str:
        """Return the sandbox of a shim; raises VmmRefused for any other process."""
        known = self._known.get(process.key)
        if known is not None:
            return known
        host, pid = self._host, process.pid
        path, _ = ("", False) if process.kernel else host.exe(pid)
        if not self.allowed.holds(path):
            raise VmmRefused(
                f"its executable {path or '(none)'} is not on the allow-list (`shims`)"
            )
        status = checks.read_status(host.root, pid)
        if not checks.is_roots(host.root, status):
            raise VmmRefused("it does not run as root")
        checks.check_namespaces(host.root, pid, status)
        self.allowed.check(host.exe_file(pid))
        named = parse_shim(host.cmdline(pid)).sandbox_id
        if not named:
            raise VmmRefused("its command line has no -id")
        if host.read_process(pid).key != process.key:
            raise VmmRefused("it exited during the check")
        if not checks.is_young(process):
            self._known[process.key] = named
        return named


# What confirms that a process is a sandbox's VMM, and how strongly (D24).
#
# Each is something that the process could not have made itself. A pid proves only what it was when
# it was written down: a hook's message does not count for a process that started after it, and no
# pid counts that the sandbox's earlier VMM had.


class Strength(IntEnum):
    """How strongly a witness confirms: of two that claim one sandbox the stronger wins."""

    NONE = 0
    CGROUP = 1
    FILE = 2
    SHIM = 3
    HOOK = 4


class Witness(NamedTuple):
    """A witness: its strength, and what it is in words."""

    strength: Strength
    text: str


class Accepted(NamedTuple):
    """The VMM that was accepted for a sandbox before, and how strongly it was confirmed."""

    process: ProcessKey
    strength: int


NO_HINTS: Final[Mapping[int, int]] = MappingProxyType({})


@dataclass
class Witnesses:
    """Gathers what confirms a sandbox's VMM; one lives for one search.

    `hints` are the pids that hooks reported over the root-only socket, each with the time of the
    first message (CLOCK_BOOTTIME in ns, 0: unknown). `before` is the VMM accepted before.
    """

    host: HostAccess
    shims: Shims
    paths: KataPaths
    sandbox_id: str
    hints: Mapping[int, int]
    before: Accepted | None
    programs: Iterable[str] = ()
    """The names of programs that Kata may run in a jail."""

    @cached_property
    def recorded(self) -> dict[int, str]:
        """The pids in Kata's files, and in which; of a VMM in the shim that is a thread."""
        pids = read_pids(self.host.root, self.paths, self.sandbox_id)
        return {checks.thread_group(self.host.root, pid): name for pid, name in pids.items()}

    @cached_property
    def jailed(self) -> set[int]:
        """The pids that jailers left in the sandbox's jails; a VMM may have written them itself."""
        return read_jailed_pids(self.host.root, self.paths, self.sandbox_id, self.programs)

    def fits(self, named: VmmCommand) -> bool:
        """Whether a command line names this sandbox, or the VM that Kata's factory gave it."""
        if named.names(self.sandbox_id):
            return True
        made = digest(self.host.root, self.paths, self.sandbox_id).factory_vm
        return bool(made) and named.names(made)

    def is_named_now(self, process: Process) -> bool:
        """Whether a hook or one of Kata's files names this process, not an earlier one."""
        return not self._is_reused(process) and (
            process.pid in self.recorded or process.pid in self.jailed or self._is_hinted(process)
        )

    def of(self, process: Process, kind: VmmKind, status: checks.Status, jail: str = "") -> Witness:
        """Return the strongest witness; raises VmmRefused without one that is strong enough.

        `jail` is the sandbox's jail where it was verified that the process runs in it.
        """
        found = self._strongest(process, kind, status, jail)
        before = self.before
        if before is None or before.process == process.key or found.strength >= before.strength:
            return found
        raise VmmRefused(
            f"it is confirmed only by {found.text}; the VMM before it (pid {before.process.pid})"
            " was confirmed by more"
        )

    def _strongest(
        self, process: Process, kind: VmmKind, status: checks.Status, jail: str
    ) -> Witness:
        pid, reused = process.pid, self._is_reused(process)
        doubts: list[str] = []
        if self._is_hinted(process) and not reused:
            return Witness(Strength.HOOK, "pid from a hook")
        if pid in self.hints:
            doubts.append("the pid in a hook was an earlier process's")
        if not kind.in_shim:
            why = self.shims.why_not(process.ppid, self.sandbox_id)
            if not why:
                return Witness(
                    Strength.SHIM, f"its parent, the sandbox's shim (pid {process.ppid})"
                )
            doubts.append(f"its parent (pid {process.ppid}) is not the shim: {why}")
        name = self.recorded.get(pid)
        if name and not reused:
            return Witness(Strength.FILE, f"pid in {name}")
        if name:
            doubts.append(f"the pid in {name} was an earlier process's")
        if jail:
            return Witness(Strength.FILE, f"its root is the sandbox's jail {jail}")
        doubts += self._cgroup_doubts(process, status)
        if not doubts[-1]:
            return Witness(Strength.CGROUP, "cgroup holds the sandbox id")
        raise VmmRefused(f"no cgroup, parent, file or hook confirms it ({'; '.join(doubts)})")

    def _is_hinted(self, process: Process) -> bool:
        stamp_ns = self.hints.get(process.pid)
        return stamp_ns is not None and checks.started_by(process, stamp_ns)

    def _is_reused(self, process: Process) -> bool:
        """Whether it has the pid of the VMM that was accepted before, and is another process."""
        before = self.before
        return (
            before is not None
            and before.process.pid == process.pid != 0
            and (before.process != process.key)
        )

    def _cgroup_doubts(self, process: Process, status: checks.Status) -> list[str]:
        """Return why no cgroup confirms it; one empty text where one does."""
        entries = self.host.cgroups(process.pid).naming(self.sandbox_id)
        if not entries:
            return ["no cgroup is named after the sandbox"]
        if not checks.is_roots(self.host.root, status):
            return ["its cgroup does not count because it does not run as root"]
        doubts = {why_not_roots(self.host.root, entry) for entry in entries}
        return [""] if "" in doubts else sorted(doubts)
