"""Finds the VMM process of a sandbox, and decides whether to believe it (D5, D24).

Processes outside the VMM that work for one sandbox only are found here too (D11).

A candidate pid comes from a hook, from Kata's files or from the claims of command lines, and
proves nothing. It is accepted when it is in the host's namespaces, its command line names the
sandbox, one witness that it cannot have made agrees (claims.py), and its executable is an
allowed file of the host. Of several, the one with the strongest witness wins; where two are
equal, neither is believed. A refused candidate is reported with its reason.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.errors import HostError, NotRead, ParseError, TaskGone, VmmError
from kata_pin.base.sandbox import Process, ProcessKey, Vmm
from kata_pin.base.steps import Steps, finish
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import KataRuntime, RoleSource, ThreadRole
from kata_pin.linux.files import HostRoot
from kata_pin.linux.proc import kernel_worker
from kata_pin.peers.vmm_cmdline import names_sandbox
from kata_pin.vmm import checks
from kata_pin.vmm.checks import DEFAULT_EXECUTABLES, DEFAULT_SHIMS, VmmAllowlist, VmmRefused
from kata_pin.vmm.claims import (
    NO_HINTS,
    Accepted,
    Shims,
    VmmClaim,
    VmmClaims,
    Witnesses,
    is_file_server,
    jail_of,
)
from kata_pin.vmm.kinds import KvmIds, VmmKind
from kata_pin.vmm.state_files import (
    HostAccess,
    KataPaths,
    digest,
    ids_of,
    state_stamp,
)

_KATA_PROGRAMS: Final = ("containerd-shim-kata", "kata-runtime", "kata-shim")

NONE_KNOWN: Final[Mapping[str, ProcessKey]] = MappingProxyType({})

_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")

_HOOK: Final = "hook"
_SCAN: Final = "scan"
_JAIL: Final = "pid file in the jail"
MAX_REFUSALS: Final = 16
"""Claims that one scan refuses after a full check, at 0.2 ms each; others wait for the next."""

REFUSED_S: Final = 30.0
"""How long a scan leaves a refused claim alone while Kata's files about it are the same."""

MAX_REASONS: Final = 8  # refused candidates that an error lists: enough to see what is wrong


class Executables(Struct, frozen=True):
    """Paths of the executables that are believed; the last part may be a pattern (fnmatch)."""

    vmms: tuple[str, ...] = DEFAULT_EXECUTABLES
    shims: tuple[str, ...] = DEFAULT_SHIMS


class VmmFinder:
    """Finds VMMs among the processes of `host`, whose table the caller refreshes."""

    def __init__(
        self,
        host: HostAccess,
        *,
        paths: KataPaths | None = None,
        executables: Executables | None = None,
        before: Callable[[str], Accepted | None] = lambda _: None,
    ) -> None:
        """`before` returns the VMM that was accepted for a sandbox before, None for none."""
        allowed = executables or Executables()
        self._host = host
        self._paths = paths or KataPaths()
        self._before = before
        self._refused: dict[str, tuple[float, object]] = {}
        self._allowed = VmmAllowlist(host.root, allowed.vmms)
        self.shims = Shims(host, allowed.shims)
        self.claims = VmmClaims(host, self._allowed, self.shims.allowed)

    def find(self, sandbox_id: str, hints: Mapping[int, int] = NO_HINTS) -> Vmm:
        """Return the sandbox's VMM.

        `hints` are pids that hooks reported over the root-only socket, with the time of the first
        message (CLOCK_BOOTTIME, ns). Raises VmmError that lists the candidates and why each was
        refused.
        """
        finish(self.claims.look())
        return self._find(sandbox_id, hints)

    def confirm(self, sandbox_id: str, hints: Mapping[int, int] = NO_HINTS) -> Vmm | None:
        """Return the VMM that was accepted before, if as much confirms it; looks at no other.

        None where there was none, where it has ended, or where `find` has to decide.
        """
        witnesses = self._witnesses(sandbox_id, hints)
        before = witnesses.before
        if before is None or not before.strength:
            return None
        try:
            vmm = self._accept(witnesses, before.process.pid)
        except VmmRefused:
            return None
        same = vmm.process == before.process and vmm.strength >= before.strength
        return vmm if same else None

    def named(self, sandbox_id: str, hints: Iterable[int]) -> list[Process]:
        """Return the processes that hooks and Kata's files name for a sandbox, and the one before.

        They are read now, and kernel threads left out.
        """
        witnesses = self._witnesses(sandbox_id, dict.fromkeys(hints, 0))
        before = [witnesses.before.process.pid] if witnesses.before else []
        pids = dict.fromkeys([*witnesses.hints, *witnesses.recorded, *witnesses.jailed, *before])
        found = []
        for pid in pids:
            with contextlib.suppress(TaskGone):
                found.append(self._host.read_process(pid))
        return [one for one in found if one.pid > 1 and not one.kernel]

    def _find(self, sandbox_id: str, hints: Mapping[int, int] = NO_HINTS) -> Vmm:
        """Return the sandbox's VMM, as of the last look at claims."""
        witnesses = self._witnesses(sandbox_id, hints)
        accepted: list[Vmm] = []
        refused: dict[int, str] = {}
        for pid, origin in self._candidates(witnesses).items():
            try:
                accepted.append(self._accept(witnesses, pid))
            except VmmRefused as reason:
                refused[pid] = f"pid {pid} ({origin}): {reason}"
        for one in accepted:
            if not one.orphan:  # its shim, which Kata's poststart hook reports, claims nothing
                refused.pop(one.parent, None)
        return _strongest(sandbox_id, accepted, list(refused.values()), witnesses.before)

    def sandboxes(self, known: Mapping[str, ProcessKey] = NONE_KNOWN) -> Steps[dict[str, int]]:
        """Return pid by sandbox id of every VMM that `find` would accept: to adopt them.

        `known` are VMMs that were accepted before, by sandbox: they are not checked again. Yields
        after each process and each sandbox that took a call.
        """
        yield from self.claims.look()
        alive = {claim.process.key: claim for claim in self.claims.all()}
        running = {one: key.pid for one, key in known.items() if key in alive}
        accepted = set(known.values())
        new = [claim for key, claim in alive.items() if key not in accepted]
        by_sandbox = self._by_sandbox(new, known)
        self._refused = {one: old for one, old in self._refused.items() if one in by_sandbox}
        due = yield from self._due(by_sandbox, known)
        left = MAX_REFUSALS
        for sandbox_id, stamp in due:
            if left <= 0:
                break
            claims = by_sandbox[sandbox_id]
            try:
                running[sandbox_id] = self._find(sandbox_id).process.pid
            except VmmError:
                left -= len(claims)
                if not any(checks.is_young(claim.process) for claim in claims):
                    self._refused[sandbox_id] = time.monotonic() + REFUSED_S, stamp
            yield
        return running

    def _due(
        self, by_sandbox: Mapping[str, Sequence[VmmClaim]], known: Container[str]
    ) -> Steps[list[tuple[str, object]]]:
        """Return the sandboxes whose claims are to be checked, each with what a refusal goes by.

        Those that Kata's files name come first. Claims without any, which use up what a scan may
        refuse, have their turn in the order of their last refusal, then of their age: new ones
        keep no older one waiting.
        """
        due: list[tuple[tuple[bool, float, int], str, object]] = []
        for sandbox_id, claims in by_sandbox.items():
            if sandbox_id in known:
                continue
            files = state_stamp(self._host.root, self._paths, sandbox_id)
            yield
            stamp = files, len(claims)
            until, before = self._refused.get(sandbox_id, (0.0, None))
            if stamp != before or time.monotonic() >= until:
                oldest = min(claim.process.key.starttime for claim in claims)
                due.append(((not any(files), until, oldest), sandbox_id, stamp))
        return [(sandbox_id, stamp) for _, sandbox_id, stamp in sorted(due, key=lambda one: one[0])]

    def _by_sandbox(
        self, claims: Iterable[VmmClaim], known: Container[str]
    ) -> dict[str, list[VmmClaim]]:
        """Return claims by the sandbox that they name; `known` have their VMM already.

        Where a command line has only the start of an id, the whole one is among those of the living
        shims and of Kata's files; without it the claim counts for none. So does a UUID: Kata's
        factories name VMs so, which may be nobody's yet.
        """
        found: dict[str, list[VmmClaim]] = {}
        whole: set[str] | None = None
        made: dict[str, str] | None = None
        for claim in claims:
            named = claim.named
            by_factory = bool(_UUID.match(named.sandbox_id))
            if not by_factory and len(named.sandbox_id) != named.id_length:
                found.setdefault(named.sandbox_id, []).append(claim)
                continue
            if whole is None:
                whole = self.shims.sandboxes() | ids_of(self._host.root, self._paths)
            if by_factory and made is None:
                root, waiting = self._host.root, (one for one in whole if one not in known)
                made = {digest(root, self._paths, one).factory_vm: one for one in waiting}
            owner = (made or {}).get(named.sandbox_id, "")
            for one in [owner] if owner else filter(named.names, whole):
                found.setdefault(one, []).append(claim)
        return found

    def is_named(self, sandbox_id: str) -> bool:
        """Whether Kata's files name a process of a sandbox, or a process seen so far claims it."""
        witnesses = self._witnesses(sandbox_id, NO_HINTS)
        return bool(self.claims.of(sandbox_id) or witnesses.recorded or witnesses.jailed)

    def is_claimed(self, sandbox_id: str, hints: Mapping[int, int] = NO_HINTS) -> bool:
        """Whether a process that a hook or Kata named claims to be the VMM, accepted or not.

        Then the administrator should see the refusal; the sandbox has not ended. A pid that an
        earlier VMM had, or that was reported before its process started, names no process of now.
        """
        witnesses = self._witnesses(sandbox_id, hints)
        named = {*witnesses.hints, *witnesses.recorded, *witnesses.jailed}
        return any(self._claims(witnesses, pid) for pid in named)

    def _claims(self, witnesses: Witnesses, pid: int) -> bool:
        """Whether its arguments name the sandbox; those of a VMM in the shim are every shim's."""
        try:
            process = self._host.read_process(pid)
            if not witnesses.is_named_now(process):
                return False
            argv = self._host.cmdline(pid)
            own = (kind for kind in self._allowed.kinds if not kind.in_shim)
            return any(witnesses.fits(kind.read_name(argv)) for kind in own)
        except NotRead as error:  # it may be: that its memory is locked does not end the sandbox
            return error.hung or self.runs_vmm(pid)
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

    def runs_vmm(self, pid: int) -> bool:
        """Whether a process runs the executable of a VMM that is a process of its own."""
        try:
            kind = self._allowed.kind_of(self._host.exe(pid)[0])
        except HostError:
            return False
        return kind is not None and not kind.in_shim

    def _witnesses(self, sandbox_id: str, hints: Mapping[int, int]) -> Witnesses:
        groups: dict[int, int] = {}
        for pid, stamp_ns in hints.items():
            if pid > 0:
                group = checks.thread_group(self._host.root, pid)
                groups[group] = min(stamp_ns, groups.get(group, stamp_ns))
        before = self._before(sandbox_id)
        programs = self._allowed.jailed_names
        return Witnesses(self._host, self.shims, self._paths, sandbox_id, groups, before, programs)

    def _candidates(self, witnesses: Witnesses) -> dict[int, str]:
        """Return pids and where they are from.

        Of the processes that only claim it, those that nothing can confirm are left out.
        """
        found = dict.fromkeys(witnesses.hints, _HOOK)
        for pid, name in witnesses.recorded.items():
            found.setdefault(pid, name)
        for pid in witnesses.jailed:
            found.setdefault(pid, _JAIL)
        for claim in self.claims.of(witnesses.sandbox_id):
            found.setdefault(claim.process.pid, _SCAN)
        return found

    def _accept(self, witnesses: Witnesses, pid: int) -> Vmm:
        """Return the VMM that a process is; raises VmmRefused. Cheap checks come first."""
        try:
            return self._checked(witnesses, pid)
        except HostError as error:
            raise VmmRefused(str(error)) from error
        except ParseError as error:
            raise VmmRefused(f"cannot read its command line: {error}") from error

    def _checked(self, witnesses: Witnesses, pid: int) -> Vmm:
        host, sandbox_id = self._host, witnesses.sandbox_id
        process = host.read_process(pid)
        path, deleted = host.exe(pid)
        kind = self._allowed.kind_of(path)
        if kind is None:
            shown = path or "(none)"
            raise VmmRefused(f"its executable {shown} is not on the allow-list (`hypervisors`)")
        status = checks.read_status(host.root, pid)
        checks.check_namespaces(host.root, pid, status)
        jailed = self._allowed.may_be_jailed(path)
        jail = jail_of(host, self._allowed, self._paths, sandbox_id, pid) if jailed else ""
        witness = witnesses.of(process, kind, status, jail)
        argv = host.cmdline(pid)
        named = kind.read_name(argv)
        if not witnesses.fits(named):
            raise VmmRefused(f"its command line names {named.sandbox_id or 'no sandbox'}")
        if kind.in_shim:
            checks.check_runs_vm(host.root, pid, kind)
        exe = host.exe_file(pid)
        if (exe.path, exe.deleted) != (path, deleted):
            raise VmmRefused("its executable changed during the check")
        if not jail:
            self._allowed.check(exe)
        command = kind.read(argv)
        shim = pid if kind.in_shim else self.shims.of(process, sandbox_id)
        if host.read_process(pid).key != process.key:
            raise VmmRefused("it exited during the check")
        return Vmm(
            kind=kind.name,
            process=process.key,
            parent=process.ppid,
            exe=path,
            witness=witness.text,
            strength=witness.strength,
            guest=command.guest,
            kvm=command.kvm,
            apic_ids=kind.kvm_ids is KvmIds.SMP,
            iothreads=command.iothreads,
            guest_cid=command.guest_cid,
            kernel=command.kernel,
            monitor=command.monitor,
            loads=command.loads,
            runtime=self._runtime(kind, sandbox_id, (*argv, f"{jail}/")),
            orphan=shim is None,
            exe_deleted=deleted,
        )

    def _runtime(self, kind: VmmKind, sandbox_id: str, paths: Iterable[str]) -> KataRuntime:
        """Return runtime-rs where one of the VMM's paths is in its directory of the sandbox.

        Only runtime-rs runs a VMM inside its shim.
        """
        folder = f"{self._paths.kata}/{sandbox_id}/"
        is_rust = kind.in_shim or any(folder in path for path in paths)
        return KataRuntime.RUST if is_rust else KataRuntime.GO


def _strongest(
    sandbox_id: str, accepted: list[Vmm], refused: list[str], before: Accepted | None
) -> Vmm:
    """Return the VMM with the strongest witness; raises VmmError where there is not just one.

    The one that was accepted before wins over one that is only as strong.
    """
    if not accepted:
        raise VmmError(f"no VMM found for sandbox {sandbox_id}{_listed(refused)}")
    known = None if before is None else before.process

    def rank(vmm: Vmm) -> tuple[int, bool]:
        return vmm.strength, vmm.process == known

    first, *rest = sorted(accepted, key=rank, reverse=True)
    equal = [one for one in rest if rank(one) == rank(first)]
    if equal:
        claims = [f"pid {one.process.pid}: {one.witness}" for one in (first, *equal)]
        raise VmmError(
            f"{len(claims)} processes are confirmed equally as the VMM of sandbox {sandbox_id};"
            f" none is believed{_listed(claims)}"
        )
    weaker = [
        f"pid {one.process.pid}: confirmed only by {one.witness}, not by {first.witness}"
        for one in rest
    ]
    return replace(first, refused=tuple((weaker + refused)[:MAX_REASONS]))


def _listed(reasons: Iterable[str]) -> str:
    texts = list(reasons)
    if not texts:
        return ""
    more = f"; and {len(texts) - MAX_REASONS} more" if len(texts) > MAX_REASONS else ""
    return f": {'; '.join(texts[:MAX_REASONS])}{more}"


# Processes outside the VMM that work for one sandbox only (D11).
#
# virtiofsd or nydusd with its children, the kernel's vhost workers and KVM helpers (kernel threads
# before Linux 6.4), and the shim. A process that merely looks alike is never included: a kernel
# thread must have the flag and be named after one of the VMM's threads, a user process must be
# named in root's persist.json or be a child of the sandbox's own shim; a child of another parent
# must name the sandbox. Nothing is kept between calls.

KTHREADD: Final = 2  # the parent of every kernel thread

MAX_DEPTH: Final = 4
"""Generations of virtiofsd's children that are followed: it has one (its sandboxed half)."""


class Helper(Struct, frozen=True):
    """A process all of whose threads have one role for the sandbox."""

    process: ProcessKey
    role: ThreadRole
    source: RoleSource


def find_helpers(
    host: HostAccess,
    vmm: Vmm,
    sandbox_id: str,
    threads: Iterable[ThreadKey],
    shims: Shims,
    *,
    paths: KataPaths | None = None,
) -> tuple[Helper, ...]:
    """Return the helpers of a sandbox, by pid; `threads` are all of the VMM's own.

    Those that vanish meanwhile are left out.
    """
    found = {helper.process: helper for helper in _kernel_workers(host, threads)}
    process = host.processes.get(vmm.process.pid)
    shim = shims.of(process, sandbox_id) if process is not None else None
    servers = _file_servers(host, vmm, sandbox_id, shim, paths or KataPaths())
    for server in _with_children(host, servers):
        found[server.key] = Helper(server.key, ThreadRole.VIRTIOFSD, RoleSource.PROCESS)
    known = host.processes.get(shim) if shim is not None else None
    if known is not None:
        found[known.key] = Helper(known.key, ThreadRole.SHIM, RoleSource.PROCESS)
    found.pop(vmm.process, None)  # a VMM inside the shim
    return tuple(found[key] for key in sorted(found))


def served_by(root: HostRoot, comm: str) -> int | None:
    """Return the process that a kernel thread of this name works for, None for other names."""
    worker = kernel_worker(comm)
    return None if worker is None else checks.thread_group(root, worker.owner)


def _kernel_workers(host: HostAccess, threads: Iterable[ThreadKey]) -> Iterator[Helper]:
    """Yield the kernel threads that were made for these threads.

    One that is older than the thread it is named after was made for an earlier thread of that tid.
    """
    named_after = host.processes.kernel_workers
    for thread in threads:
        for process in named_after.get(thread.tid, ()):
            worker = kernel_worker(process.comm)
            if worker and process.ppid == KTHREADD and process.key.starttime >= thread.starttime:
                yield Helper(process.key, worker.role, RoleSource.FLAGS)


def _file_servers(
    host: HostAccess, vmm: Vmm, sandbox_id: str, shim: int | None, paths: KataPaths
) -> Iterator[Process]:
    """Yield virtiofsd or nydusd: the pid in persist.json, or the shim's child.

    A shim has one sandbox, so nothing that takes long need be read of its children. Where the VMM
    has another parent, or its shim is not known yet, the arguments have to name the sandbox.
    """
    recorded = digest(host.root, paths, sandbox_id).virtiofsd_pid
    parents = {shim, vmm.parent if vmm.parent > 1 else None} - {None}
    if recorded:
        process = host.processes.get(recorded)
        if process is not None and _is_file_server(host, process):
            yield process
    for parent in parents:
        for child in host.processes.children(parent or 0):
            if _is_file_server(host, child) and (parent == shim or _names(host, child, sandbox_id)):
                yield child


def _with_children(host: HostAccess, servers: Iterable[Process]) -> Iterator[Process]:
    generation = list(servers)
    for _ in range(MAX_DEPTH):
        yield from generation
        generation = [c for server in generation for c in host.processes.children(server.key.pid)]


def _is_file_server(host: HostAccess, process: Process) -> bool:
    """Whether its executable is a file server's; exec names the process after it."""
    if not is_file_server(process.comm):
        return False
    try:
        path, _ = host.exe(process.key.pid)
    except HostError:
        return False
    return is_file_server(path)


def _names(host: HostAccess, process: Process, sandbox_id: str) -> bool:
    try:
        return names_sandbox(host.cmdline(process.key.pid), sandbox_id)
    except HostError:
        return False
