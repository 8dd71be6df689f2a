"""The shim of a sandbox: the process of Kata's runtime that started the VMM and holds its QMP.

A shim is believed when root runs it by every uid (a setuid program shows the caller's), when its
executable is an allowed one (`shims`), and its command line has `-id <sandbox>` (containerd's shim
protocol). A VMM without a living shim is an orphan: Kata's shim panics and leaves QEMU behind (seen
with 3.21, enable_vcpus_pinning). Kata 1.x starts QEMU with -daemonize, so its parent is pid 1
although a shim lives: shims are searched among all processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from kata_pin.errors import HostError, ParseError
from kata_pin.model.thread import Process, ProcessKey
from kata_pin.vmm import checks
from kata_pin.vmm.allow_list import DEFAULT_SHIMS, Allowlist
from kata_pin.vmm.checks import Refused
from kata_pin.vmm.host_access import HostAccess
from kata_pin.wire.vmm_cmdline import parse_shim

SHIM_COMMS: Final = frozenset({"containerd-shim", "containerd-shi", "kata-shim", "kata-runtime"})
"""Names of shim processes, cut at 15 characters by the kernel: they narrow the search only."""

MAX_KNOWN: Final = 4096


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

    def of(self, vmm: Process, sandbox_id: str) -> int | None:
        """Return the pid of the sandbox's living shim, None when there is none."""
        if self.is_shim_of(vmm.ppid, sandbox_id):
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
                with suppress(HostError, ParseError, Refused):
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
        except (HostError, ParseError, Refused) as error:
            return str(error)
        return "" if named == sandbox_id else f"it is the shim of {named}"

    def _sandbox_of(self, process: Process) -> str:
        """Return the sandbox of a shim; raises Refused for any other process."""
        known = self._known.get(process.key)
        if known is not None:
            return known
        host, pid = self._host, process.pid
        path, _ = ("", False) if process.kernel else host.exe(pid)
        if not self.allowed.holds(path):
            raise Refused(f"its executable {path or '(none)'} is not on the allow-list (`shims`)")
        status = checks.read_status(host.root, pid)
        if not checks.is_roots(host.root, status):
            raise Refused("it does not run as root")
        checks.check_namespaces(host.root, pid, status)
        self.allowed.check(host.exe_file(pid))
        named = parse_shim(host.cmdline(pid)).sandbox_id
        if not named:
            raise Refused("its command line has no -id")
        if host.read_process(pid).key != process.key:
            raise Refused("it exited during the check")
        if not checks.is_young(process):
            if len(self._known) >= MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[process.key] = named
        return named
