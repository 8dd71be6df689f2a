"""Which processes say that they are a sandbox's VMM: a look at each process, once.

A claim proves nothing (find.py asks for a witness), and anybody can make one, so all that is done
for it is cheap, cheapest first, and kept by the process's identity: is it a kernel thread, does
root run it or its parent (as a shim would be), is its executable's path on the list, is it in the
host's namespaces, whom does its `-name` name. Of a stranger nothing else is read: only a hook or a
file can confirm it, and they name its pid. A process is looked at again while it is young, and when
its name (exec changes it) or its parent changed.
"""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Final

from kata_pin.errors import HostError, NotRead, ParseError
from kata_pin.model.steps import Steps
from kata_pin.model.thread import Process, ProcessKey
from kata_pin.vmm import checks
from kata_pin.vmm.allow_list import Allowlist, VmmAllowlist
from kata_pin.vmm.checks import Refused
from kata_pin.vmm.host_access import HostAccess
from kata_pin.wire.vmm_cmdline import FIRECRACKER_ID, VmmCommand

FILE_SERVERS: Final = ("virtiofsd", "nydusd")


def is_file_server(exe: str) -> bool:
    """Whether a path is that of a program which serves a sandbox's shared file system."""
    return os.path.basename(exe).startswith(FILE_SERVERS)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a process says: the sandbox it names."""

    process: Process
    named: VmmCommand


@dataclass
class Claims:
    """See the module; one lives as long as its finder.

    `unread` are the processes whose command lines could not be read yet; they are looked at again.
    """

    _host: HostAccess
    _allowed: VmmAllowlist
    _shims: Allowlist
    unread: dict[ProcessKey, Process] = field(default_factory=dict)
    _seen: dict[ProcessKey, tuple[str, int]] = field(default_factory=dict)
    _claims: dict[ProcessKey, Claim] = field(default_factory=dict)
    _by_name: dict[str, dict[ProcessKey, Claim]] = field(default_factory=dict)

    def look(self) -> Steps[None]:
        """Look at processes that are new, young or renamed; yields after each that took a call."""
        processes = {one.key: one for one in self._host.processes.all()}
        self._forget(processes.keys())
        for key, process in processes.items():
            if self._seen.get(key) != (process.comm, process.ppid):
                self._look_at(process)
                yield

    def of(self, sandbox_id: str) -> Sequence[Claim]:
        """Return the claims that name a sandbox, as of the last look."""
        found = {**self._by_name.get(sandbox_id, {})}
        found |= self._by_name.get(sandbox_id[:FIRECRACKER_ID], {})
        return [claim for claim in found.values() if claim.named.names(sandbox_id)]

    def all(self) -> Sequence[Claim]:
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

    def _look_at(self, process: Process) -> None:
        self._drop(process.key)
        if process.kernel or not self._is_trusted(process):  # stays so until it execs
            self._seen[process.key] = process.comm, process.ppid
            return
        try:
            claim = self._claim_of(process)
        except NotRead:
            self.unread[process.key] = process
            return
        except (HostError, ParseError, Refused):
            claim = None
        if claim is not None:
            self._claims[process.key] = claim
            self._by_name.setdefault(claim.named.sandbox_id, {})[process.key] = claim
        if not checks.is_young(process):
            self._seen[process.key] = process.comm, process.ppid

    def _claim_of(self, process: Process) -> Claim | None:
        path, _ = self._host.exe(process.pid)
        kind = self._allowed.kind_of(path)
        if kind is None:
            if self._shims.holds(path) or is_file_server(path):
                self._host.cmdline(process.pid)  # a pass will want it
            return None
        status = checks.read_status(self._host.root, process.pid)
        checks.check_namespaces(self._host.root, process.pid, status)
        named = kind.read_name(self._host.cmdline(process.pid))
        return Claim(process, named) if named.sandbox_id else None

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
