"""Processes outside the VMM that work for one sandbox only (D11).

virtiofsd or nydusd with its children, the kernel's vhost workers and KVM helpers (kernel threads
before Linux 6.4), and the shim. A process that merely looks alike is never included: a kernel
thread must have the flag and be named after one of the VMM's threads, a user process must be named
in root's persist.json or be a child of the sandbox's own shim; a child of another parent must name
the sandbox. Nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kata_pin.errors import HostError
from kata_pin.model.sandbox import Vmm
from kata_pin.model.thread import Process, ProcessKey, RoleSource, ThreadKey, ThreadRole
from kata_pin.vmm import checks
from kata_pin.vmm.claims import is_file_server
from kata_pin.vmm.host_access import HostAccess, HostPaths
from kata_pin.vmm.shims import Shims
from kata_pin.vmm.state_files import KataPaths, virtiofsd_pid
from kata_pin.wire.proc import kernel_worker
from kata_pin.wire.vmm_cmdline import names_sandbox

KTHREADD: Final = 2  # the parent of every kernel thread

MAX_DEPTH: Final = 4
"""Generations of virtiofsd's children that are followed: it has one (its sandboxed half)."""


@dataclass(frozen=True)
class Helper:
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


def served_by(root: HostPaths, comm: str) -> int | None:
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
    recorded = virtiofsd_pid(host.root, paths, sandbox_id)
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
