"""The shim of a sandbox: the process of Kata's runtime that started the VMM and holds its QMP.

A shim is believed when it belongs to root or to our uid and its command line has `-id <sandbox>`
(containerd's shim protocol). A VMM without a living shim is an orphan: Kata's shim panics and
leaves QEMU behind (seen with 3.21, enable_vcpus_pinning). Kata 1.x starts QEMU with -daemonize, so
its parent is pid 1 although a shim lives: shims are searched among all processes.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Final

from kata_pin.errors import HostError, ParseError
from kata_pin.model.thread import Process, ProcessKey
from kata_pin.vmm import checks
from kata_pin.vmm.host_access import HostAccess
from kata_pin.wire.vmm_cmdline import parse_shim

SHIM_COMMS: Final = frozenset({"containerd-shim", "containerd-shi", "kata-shim", "kata-runtime"})
"""Names of shim processes, cut at 15 characters by the kernel: they narrow the search only."""


def shim_of(host: HostAccess, vmm: Process, sandbox_id: str) -> int | None:
    """Return the pid of the sandbox's living shim, None when there is none."""
    if is_shim_of(host, vmm.ppid, sandbox_id):
        return vmm.ppid
    for process in host.processes.all():
        if process.comm in SHIM_COMMS and is_shim_of(host, process.key.pid, sandbox_id):
            return process.key.pid
    return None


def is_shim_of(host: HostAccess, pid: int, sandbox_id: str) -> bool:
    """Whether a process is the sandbox's shim, by its owner and its command line."""
    if pid <= 1:
        return False
    try:
        known = host.processes.get(pid) or host.read_process(pid)
        return not known.kernel and _sandbox_of(host, known.key) == sandbox_id
    except (HostError, ParseError, LookupError):
        return False


@lru_cache(maxsize=4096)
def _sandbox_of(host: HostAccess, process: ProcessKey) -> str:
    """Return the sandbox of a shim; LookupError for any other process, which is not remembered.

    Every pass asks. A shim stays the shim of its sandbox, but a process that is none yet may be
    between its fork and its exec.
    """
    named = parse_shim(host.cmdline(process.pid)).sandbox_id
    if not named or checks.owner(host.root, process.pid) not in {0, os.geteuid()}:
        raise LookupError(process.pid)
    return named
