"""Finds the VMM process of a sandbox, and decides whether to believe it (D5).

A candidate pid comes from a hook, from Kata's files or from a scan of command lines, and proves
nothing. It is accepted when its executable is on the allow-list, its command line names the
sandbox, and one witness that the VMM cannot write agrees: a cgroup that holds the id, a parent shim
with that id, the pid in one of root's files, or a hook's pid from the root-only socket. A refused
candidate is reported with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from kata_pin.errors import HostError, ParseError, VmmError
from kata_pin.model.sandbox import Vmm
from kata_pin.model.thread import Process, ProcessKey
from kata_pin.vmm import checks
from kata_pin.vmm.allow_list import DEFAULT_EXECUTABLES, Allowlist
from kata_pin.vmm.checks import Refused
from kata_pin.vmm.host_access import HostAccess
from kata_pin.vmm.kinds import KvmIds, VmmKind
from kata_pin.vmm.shims import is_shim_of, shim_of
from kata_pin.vmm.state_files import KataPaths, read_pids
from kata_pin.wire.vmm_cmdline import VmmCommand

_KATA_PROGRAMS: Final = ("containerd-shim-kata", "kata-runtime", "kata-shim")

NONE_KNOWN: Final[Mapping[str, ProcessKey]] = MappingProxyType({})

_HOOK: Final = "hook"
_SCAN: Final = "scan"
MAX_REASONS: Final = 8  # refused candidates that an error lists: enough to see what is wrong


class VmmFinder:
    """Finds VMMs; `executables` are paths, whose last part may be a pattern (fnmatch)."""

    def __init__(
        self,
        host: HostAccess,
        *,
        paths: KataPaths | None = None,
        executables: Iterable[str] = DEFAULT_EXECUTABLES,
    ) -> None:
        self._host = host
        self._paths = paths or KataPaths()
        self._allowed = Allowlist(host.root, executables)

    def find(self, sandbox_id: str, hints: Sequence[int] = ()) -> Vmm:
        """Return the sandbox's VMM; `hints` are pids that hooks reported over the root-only socket.

        Raises VmmError that lists every candidate and why it was refused.
        """
        refused: dict[int, str] = {}
        for pid, origin in self._candidates(sandbox_id, hints):
            if pid not in refused:
                try:
                    return self._accept(sandbox_id, pid, origin)
                except Refused as reason:
                    refused[pid] = f"pid {pid} ({origin}): {reason}"
        raise VmmError(f"no VMM found for sandbox {sandbox_id}{_listed(refused.values())}")

    def sandboxes(self, known: Mapping[str, ProcessKey] = NONE_KNOWN) -> dict[str, int]:
        """Return pid by sandbox id of every VMM that `find` would accept: to adopt them.

        `known` are VMMs that were accepted before, by sandbox: they are not checked again.
        """
        found: dict[str, int] = {}
        sandbox_of = {key: sandbox_id for sandbox_id, key in known.items()}
        for process in self._host.processes.all():
            sandbox_id = sandbox_of.get(process.key) or self._believed(process)
            if sandbox_id:
                found.setdefault(sandbox_id, process.pid)
        return found

    def _believed(self, process: Process) -> str:
        """Return the sandbox whose VMM a process is, empty where it is none."""
        command = self._command(process)
        if command is None or not command.sandbox_id:
            return ""
        try:
            self._accept(command.sandbox_id, process.pid, _SCAN)
        except Refused:
            return ""
        return command.sandbox_id

    def is_claimed(self, sandbox_id: str, hints: Sequence[int] = ()) -> bool:
        """Whether a process that a hook or Kata named claims to be the VMM, accepted or not.

        Then the administrator should see the refusal; the sandbox has not ended.
        """
        pids = {checks.thread_group(self._host.root, pid) for pid in hints if pid > 0}
        return any(
            self._claims(pid, sandbox_id) for pid in pids | self._recorded(sandbox_id).keys()
        )

    def _claims(self, pid: int, sandbox_id: str) -> bool:
        """Whether its arguments name the sandbox; those of a VMM in the shim are every shim's."""
        try:
            argv = self._host.cmdline(pid)
            own = (kind for kind in self._allowed.kinds if not kind.in_shim)
            return any(kind.read(argv).names(sandbox_id) for kind in own)
        except (HostError, ParseError):
            return False

    def is_kata(self, pid: int) -> bool | None:
        """Whether a hook's pid is Kata's: a VMM, its shim or its runtime; None when it is gone.

        A thread's id counts as its process's: Kata's hooks report a thread of the shim.
        """
        try:
            path, _ = self._host.exe(checks.thread_group(self._host.root, pid))
        except HostError:
            return None
        name = os.path.basename(path)
        return self._allowed.kind_of(path) is not None or name.startswith(_KATA_PROGRAMS)

    def _candidates(self, sandbox_id: str, hints: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Yield pids and their origin, cheap ones first: most calls need no scan."""
        for pid in hints:
            if pid > 0:
                yield checks.thread_group(self._host.root, pid), _HOOK
        yield from self._recorded(sandbox_id).items()
        for process in self._host.processes.all():
            command = self._command(process)
            if command is not None and command.names(sandbox_id):
                yield process.pid, _SCAN

    def _command(self, process: Process) -> VmmCommand | None:
        """Return what a command line says, None when the executable is no VMM's."""
        if process.kernel:
            return None
        try:
            path, _ = self._host.exe(process.pid)
            kind = self._allowed.kind_of(path)
            return None if kind is None else kind.read(self._host.cmdline(process.pid))
        except (HostError, ParseError):
            return None

    def _accept(self, sandbox_id: str, pid: int, origin: str) -> Vmm:
        try:
            process = self._host.read_process(pid)
            path, deleted = self._host.exe(pid)
            kind = self._allowed.check(pid, path, deleted=deleted)
            checks.check_namespace(self._host.root, pid)
            command = kind.read(self._host.cmdline(pid))
            if not command.names(sandbox_id):
                raise Refused(f"its command line names {command.sandbox_id or 'no sandbox'}")
            if kind.in_shim:
                checks.check_runs_vm(self._host.root, pid, kind)
            by_hook = "pid from a hook" if origin == _HOOK else ""
            witness = self._witness(sandbox_id, process, kind) or by_hook
            if not witness:
                raise Refused("no cgroup, parent, file or hook confirms it")
            shim = pid if kind.in_shim else shim_of(self._host, process, sandbox_id)
            if self._host.read_process(pid).key != process.key:
                raise Refused("it exited during the check")
        except HostError as error:
            raise Refused(str(error)) from error
        except ParseError as error:
            raise Refused(f"cannot read its command line: {error}") from error
        return Vmm(
            kind=kind.name,
            process=process.key,
            parent=process.ppid,
            exe=path,
            witness=witness,
            guest=command.guest,
            kvm=command.kvm,
            apic_ids=kind.kvm_ids is KvmIds.SMP,
            iothreads=command.iothreads,
            guest_cid=command.guest_cid,
            kernel=command.kernel,
            orphan=shim is None,
            exe_deleted=deleted,
        )

    def _witness(self, sandbox_id: str, process: Process, kind: VmmKind) -> str:
        """Return the evidence that the VMM itself cannot write, empty for none."""
        if self._host.cgroups(process.pid).names(sandbox_id):
            return "cgroup holds the sandbox id"
        if not kind.in_shim and is_shim_of(self._host, process.ppid, sandbox_id):
            return f"its parent, the sandbox's shim (pid {process.ppid})"
        name = self._recorded(sandbox_id).get(process.pid)
        return f"pid in {name}" if name else ""

    def _recorded(self, sandbox_id: str) -> dict[int, str]:
        """Return the pids in Kata's files, and in which; of a VMM in the shim that is a thread."""
        pids = read_pids(self._host.root, self._paths, sandbox_id)
        return {checks.thread_group(self._host.root, pid): name for pid, name in pids.items()}


def _listed(reasons: Iterable[str]) -> str:
    texts = list(reasons)
    if not texts:
        return ""
    more = f"; and {len(texts) - MAX_REASONS} more" if len(texts) > MAX_REASONS else ""
    return f": {'; '.join(texts[:MAX_REASONS])}{more}"
