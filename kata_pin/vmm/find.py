"""Finds the VMM process of a sandbox, and decides whether to believe it (D5, D24).

A candidate pid comes from a hook, from Kata's files or from the claims of command lines, and proves
nothing. It is accepted when it is in the host's namespaces, its command line names the sandbox, one
witness that it cannot have made agrees (witnesses.py), and its executable is an allowed file of the
host. Of several, the one with the strongest witness wins; where two are equal, neither is believed.
A refused candidate is reported with its reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from kata_pin.errors import HostError, NotRead, ParseError, VmmError
from kata_pin.model.sandbox import Vmm
from kata_pin.model.steps import finish
from kata_pin.model.thread import ProcessKey
from kata_pin.vmm import checks
from kata_pin.vmm.allow_list import DEFAULT_EXECUTABLES, DEFAULT_SHIMS, VmmAllowlist
from kata_pin.vmm.checks import Refused
from kata_pin.vmm.claims import Claim, Claims
from kata_pin.vmm.host_access import HostAccess
from kata_pin.vmm.jails import jail_of
from kata_pin.vmm.kinds import KvmIds
from kata_pin.vmm.shims import Shims
from kata_pin.vmm.state_files import KataPaths, ids_of, state_stamp
from kata_pin.vmm.witnesses import NO_HINTS, Accepted, Witnesses

_KATA_PROGRAMS: Final = ("containerd-shim-kata", "kata-runtime", "kata-shim")

NONE_KNOWN: Final[Mapping[str, ProcessKey]] = MappingProxyType({})

_HOOK: Final = "hook"
_SCAN: Final = "scan"
_JAIL: Final = "pid file in the jail"
MAX_REFUSALS: Final = 16
"""Claims that one scan refuses after a full check, at 0.2 ms each; others wait for the next."""

REFUSED_S: Final = 30.0
"""How long a scan leaves a refused claim alone while Kata's files about it are the same."""

MAX_REASONS: Final = 8  # refused candidates that an error lists: enough to see what is wrong


@dataclass(frozen=True)
class Executables:
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
        self.claims = Claims(host, self._allowed, self.shims.allowed)

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
        except Refused:
            return None
        same = vmm.process == before.process and vmm.strength >= before.strength
        return vmm if same else None

    def named(self, sandbox_id: str, hints: Iterable[int]) -> Sequence[int]:
        """Return the pids that hooks and Kata's files name for a sandbox, and the one before."""
        witnesses = self._witnesses(sandbox_id, dict.fromkeys(hints, 0))
        before = [witnesses.before.process.pid] if witnesses.before else []
        jailed = witnesses.jailed
        return list(dict.fromkeys([*witnesses.hints, *witnesses.recorded, *jailed, *before]))

    def _find(self, sandbox_id: str, hints: Mapping[int, int] = NO_HINTS) -> Vmm:
        """Return the sandbox's VMM, as of the last look at claims."""
        witnesses = self._witnesses(sandbox_id, hints)
        accepted: list[Vmm] = []
        refused: dict[int, str] = {}
        for pid, origin in self._candidates(witnesses).items():
            try:
                accepted.append(self._accept(witnesses, pid))
            except Refused as reason:
                refused[pid] = f"pid {pid} ({origin}): {reason}"
        for one in accepted:
            if not one.orphan:  # its shim, which Kata's poststart hook reports, claims nothing
                refused.pop(one.parent, None)
        return _strongest(sandbox_id, accepted, list(refused.values()), witnesses.before)

    def sandboxes(self, known: Mapping[str, ProcessKey] = NONE_KNOWN) -> dict[str, int]:
        """Return pid by sandbox id of every VMM that `find` would accept: to adopt them.

        `known` are VMMs that were accepted before, by sandbox: they are not checked again.
        """
        return dict(one for one in self.scan(known) if one is not None)

    def scan(
        self, known: Mapping[str, ProcessKey] = NONE_KNOWN
    ) -> Iterator[tuple[str, int] | None]:
        """Yield the same one by one, and None after each process that took a call."""
        for _ in self.claims.look():
            yield None
        alive = {claim.process.key: claim for claim in self.claims.all()}
        for sandbox_id, key in known.items():
            if key in alive:
                yield sandbox_id, key.pid
        accepted = set(known.values())
        new = [claim for key, claim in alive.items() if key not in accepted]
        by_sandbox = self._by_sandbox(new)
        self._refused = {one: old for one, old in self._refused.items() if one in by_sandbox}
        left = MAX_REFUSALS
        for sandbox_id in by_sandbox.keys() - known.keys():
            claims = by_sandbox[sandbox_id]
            stamp = state_stamp(self._host.root, self._paths, sandbox_id), len(claims)
            until, before = self._refused.get(sandbox_id, (0.0, None))
            if left <= 0 or (stamp == before and time.monotonic() < until):
                continue
            try:
                yield sandbox_id, self._find(sandbox_id).process.pid
            except VmmError:
                left -= len(claims)
                if not any(checks.is_young(claim.process) for claim in claims):
                    self._refused[sandbox_id] = time.monotonic() + REFUSED_S, stamp
                yield None

    def _by_sandbox(self, claims: Iterable[Claim]) -> dict[str, list[Claim]]:
        """Return claims by the sandbox that they name.

        Where a command line has only the start of an id, the whole one is among those of the living
        shims and of Kata's files; without it the claim counts for none.
        """
        found: dict[str, list[Claim]] = {}
        whole: set[str] | None = None
        for claim in claims:
            named = claim.named
            if len(named.sandbox_id) != named.id_length:
                found.setdefault(named.sandbox_id, []).append(claim)
                continue
            if whole is None:
                whole = self.shims.sandboxes() | ids_of(self._host.root, self._paths)
            for one in filter(named.names, whole):
                found.setdefault(one, []).append(claim)
        return found

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
            return any(kind.read_name(argv).names(witnesses.sandbox_id) for kind in own)
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
        """Return the VMM that a process is; raises Refused. Cheap checks come first."""
        try:
            return self._checked(witnesses, pid)
        except HostError as error:
            raise Refused(str(error)) from error
        except ParseError as error:
            raise Refused(f"cannot read its command line: {error}") from error

    def _checked(self, witnesses: Witnesses, pid: int) -> Vmm:
        host, sandbox_id = self._host, witnesses.sandbox_id
        process = host.read_process(pid)
        path, deleted = host.exe(pid)
        kind = self._allowed.kind_of(path)
        if kind is None:
            shown = path or "(none)"
            raise Refused(f"its executable {shown} is not on the allow-list (`hypervisors`)")
        status = checks.read_status(host.root, pid)
        checks.check_namespaces(host.root, pid, status)
        jailed = self._allowed.may_be_jailed(path)
        jail = jail_of(host, self._allowed, self._paths, sandbox_id, pid) if jailed else ""
        witness = witnesses.of(process, kind, status, jail)
        argv = host.cmdline(pid)
        named = kind.read_name(argv)
        if not named.names(sandbox_id):
            raise Refused(f"its command line names {named.sandbox_id or 'no sandbox'}")
        if kind.in_shim:
            checks.check_runs_vm(host.root, pid, kind)
        exe = host.exe_file(pid)
        if (exe.path, exe.deleted) != (path, deleted):
            raise Refused("its executable changed during the check")
        if not jail:
            self._allowed.check(exe)
        command = kind.read(argv)
        shim = pid if kind.in_shim else self.shims.of(process, sandbox_id)
        if host.read_process(pid).key != process.key:
            raise Refused("it exited during the check")
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
            orphan=shim is None,
            exe_deleted=deleted,
        )


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
