"""What Kata left on disk about a sandbox, and how the vmm package reads the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from msgspec import Struct

from kata_pin.base.errors import HostError, ParseError, is_transient
from kata_pin.base.json_text import is_id
from kata_pin.base.sandbox import Process
from kata_pin.base.values import ContainerState
from kata_pin.linux.files import HostRoot
from kata_pin.linux.owned_files import FileRefused, read_below
from kata_pin.linux.proc import Cgroups, ExeFile
from kata_pin.linux.process import ProcessIndex
from kata_pin.peers.kata import PersistedSandbox, container_state, parse_persist, parse_rs_state
from kata_pin.peers.vmm_cmdline import FIRECRACKER_ID

# How the vmm package reads the host.
#
# The daemon composes a HostAccess from kata_pin.linux; it lives as long as the daemon, or one
# command. Every reader raises TaskGone when the process is gone.


class HostAccess(Struct, frozen=True):
    """The host's readers. The caller refreshes `processes`; the others read afresh each time.

    `cmdline` and `exe_file` may be answered from what was read before, because
    reading them can take for ever; they raise NotRead where that is not there. `exe_paths` returns
    the paths of several processes at once, empty where `exe` has none.
    """

    root: HostRoot
    processes: ProcessIndex
    read_process: Callable[[int], Process]
    cmdline: Callable[[int], Sequence[str]]
    exe: Callable[[int], tuple[str, bool]]
    exe_paths: Callable[[Sequence[int]], Sequence[str]]
    exe_file: Callable[[int], ExeFile]
    cgroups: Callable[[int], Cgroups]


# What Kata left on disk about a sandbox: the pid file, persist.json, state.json.
#
# Only files of root (or of our own uid) are believed, and no symlink below Kata's directories is
# followed, so a pid from here is a witness in the sense of D5. Kata rewrites persist.json in place:
# a half-written one counts as absent and is read next time. A file that cannot be read for a
# passing reason (too many open files) is a HostError: nothing follows from it. Paths: Go runtime
# virtcontainers/persist/fs and qemu.go (-pidfile); runtime-rs crates/persist.

MAX_PERSIST: Final = 4 * 1024 * 1024
MAX_PID_FILE: Final = 32
MAX_DIGESTS: Final = 1024


class StateDigest(NamedTuple):
    """What every pass asks of a state file.

    `factory_vm` is what the Go runtime's factory named the VM, empty where it made none. `pinning`
    is whether Kata pins the vCPUs too (enable_vcpus_pinning), and the file's name; None without a
    file that can be believed, or while it is being written.
    """

    virtiofsd_pid: int = 0
    factory_vm: str = ""
    pinning: tuple[bool, str] | None = None


_DIGESTS: Final[dict[tuple[HostRoot, KataPaths, str], tuple[tuple[int, int], StateDigest]]] = {}
"""By sandbox: the file's stamp and what it said then."""

_PID: Final = re.compile(rb"[0-9]{1,10}\n?\Z")


class KataPaths(Struct, frozen=True):
    """Where Kata keeps its state: the Go runtime below `vc`, runtime-rs below `kata`."""

    vc: str = "/run/vc"
    kata: str = "/run/kata"

    def main_qmp(self, sandbox_id: str) -> str:
        """Return the Go runtime's QMP socket; runtime-rs has its in the bundle and keeps it."""
        return f"{self.vc}/vm/{sandbox_id}/qmp.sock"

    def jails(self, program: str, sandbox_id: str) -> list[tuple[str, tuple[str, ...]]]:
        """Return where a sandbox's jail may be, there or not: the base, and the parts below it.

        Of Go's runtime (virtcontainers/fc.go, which cuts ids), and of runtime-rs.
        """
        ids = dict.fromkeys((sandbox_id[:FIRECRACKER_ID], sandbox_id))
        return [(base, (program, one, "root")) for base in (self.vc, self.kata) for one in ids]

    def extra_monitor(self, sandbox_id: str) -> str:
        """Return the debug monitor socket (extra_monitor_socket = "qmp"), there or not."""
        return f"{self.vc}/vm/{sandbox_id}/extra-monitor.sock"


class _File(NamedTuple):
    """One of the two files that hold a sandbox's state: `parts` are below `base`."""

    base: str
    parts: tuple[str, ...]
    parse: Callable[[bytes], PersistedSandbox]

    def read(self, root: HostRoot) -> PersistedSandbox | None:
        data = _read(root, self.base, *self.parts, limit=MAX_PERSIST)
        return None if data is None else self.parse(data)


def _files(paths: KataPaths, sandbox_id: str) -> tuple[_File, ...]:
    """Return the state files of both runtimes; none for an id that could lead elsewhere."""
    if not is_id(sandbox_id):
        return ()
    return (
        _File(paths.vc, ("sbs", sandbox_id, "persist.json"), parse_persist),
        _File(paths.kata, (sandbox_id, "state.json"), parse_rs_state),
    )


def _states(
    root: HostRoot, paths: KataPaths, sandbox_id: str
) -> Iterator[tuple[str, PersistedSandbox]]:
    """Yield the name and the content of each state file that is there and whole."""
    for file in _files(paths, sandbox_id):
        try:
            state = file.read(root)
        except ParseError:
            continue
        if state is not None:
            yield file.parts[-1], state


def read_pids(root: HostRoot, paths: KataPaths, sandbox_id: str) -> dict[int, str]:
    """Return the pids that Kata's files give for the VMM, each with the name of the file."""
    pids: dict[int, str] = {}
    if is_id(sandbox_id):
        data = _read(root, paths.vc, "vm", sandbox_id, "pid", limit=MAX_PID_FILE) or b""
        if _PID.match(data) and int(data):
            pids[int(data)] = "pid file"
    for name, state in _states(root, paths, sandbox_id):
        if state.vmm_pid:
            pids.setdefault(state.vmm_pid, name)
    return pids


def read_jailed_pids(
    root: HostRoot, paths: KataPaths, sandbox_id: str, programs: Iterable[str]
) -> set[int]:
    """Return the pids that jailers left in a sandbox's jails: whom to look at, and no more.

    A VMM may write its own jail's file. Of Go's runtime, whose persist.json may have the pid of a
    jailer that has ended; with runtime-rs the jailer becomes the VMM.
    """
    if not is_id(sandbox_id):
        return set()
    found = (
        _read(root, base, *jail, f"{name}.pid", limit=MAX_PID_FILE) or b""
        for name in programs
        for base, jail in paths.jails(name, sandbox_id)[:1]
    )
    return {int(data) for data in found if _PID.match(data) and int(data)}


def ids_of(root: HostRoot, paths: KataPaths) -> set[str]:
    """Return the ids of the sandboxes that Kata keeps a state of."""
    found: set[str] = set()
    for folder in (f"{paths.vc}/sbs", paths.kata):
        with suppress(OSError):
            found.update(filter(is_id, root.calls.folders(root.path(folder))))
    return found


def forget_state(root: HostRoot, paths: KataPaths, sandbox_id: str) -> None:
    """Drop what was kept of a sandbox that ended."""
    _DIGESTS.pop((root, paths, sandbox_id), None)


def digest(root: HostRoot, paths: KataPaths, sandbox_id: str) -> StateDigest:
    """Return what every pass over a sandbox asks for, read when it changed: it can be long."""
    key, stamp = (root, paths, sandbox_id), state_stamp(root, paths, sandbox_id)
    kept = _DIGESTS.get(key)
    if kept is None or kept[0] != stamp:
        if len(_DIGESTS) >= MAX_DIGESTS:
            del _DIGESTS[next(iter(_DIGESTS))]
        kept = _DIGESTS[key] = stamp, _read_digest(root, paths, sandbox_id)
    return kept[1]


def _read_digest(root: HostRoot, paths: KataPaths, sandbox_id: str) -> StateDigest:
    for name, state in _states(root, paths, sandbox_id):
        pinning = state.vcpu_pinning, name
        return StateDigest(state.virtiofsd_pid, state.factory_vm, pinning)
    return StateDigest()


def read_state(root: HostRoot, paths: KataPaths, sandbox_id: str) -> PersistedSandbox | None:
    """Return what Kata keeps of a sandbox; None without a file that can be believed."""
    return next((state for _, state in _states(root, paths, sandbox_id)), None)


def state_problem(root: HostRoot, paths: KataPaths, sandbox_id: str) -> str:
    """Return why read_state returns None for a file that is there; empty where none is."""
    try:
        if any(file.read(root) for file in _files(paths, sandbox_id)):
            return ""
    except ParseError as error:
        return str(error)
    if any(state_stamp(root, paths, sandbox_id)):
        return f"not owned by root, or larger than {MAX_PERSIST} bytes"
    return ""


def state_stamp(root: HostRoot, paths: KataPaths, sandbox_id: str) -> tuple[int, int]:
    """Return modification time and size of what read_state reads; zeros where there is none."""
    for file in _files(paths, sandbox_id):
        try:
            status = root.calls.file(root.path(file.base), file.parts, 0).status
        except OSError as error:
            if is_transient(error):
                raise HostError("look at", "/".join(file.parts), error.errno or 0) from error
            continue
        return status.modified_ns, status.size
    return 0, 0


def read_container_state(
    root: HostRoot, paths: KataPaths, sandbox_id: str, container_id: str
) -> ContainerState:
    """Return the state that Go's runtime keeps of a container; running where it keeps none."""
    if is_id(sandbox_id) and is_id(container_id):
        parts = ("sbs", sandbox_id, container_id, "persist.json")
        data = _read(root, paths.vc, *parts, limit=MAX_PERSIST)
        with suppress(ParseError):
            return ContainerState.RUNNING if data is None else container_state(data)
    return ContainerState.RUNNING


def _read(root: HostRoot, base: str, *parts: str, limit: int) -> bytes | None:
    """Return a file of root's or ours below `base`, None if it is absent or cannot be believed.

    HostError if it cannot be read for a passing reason.
    """
    try:
        return read_below(root.path(base), *parts, limit=limit, calls=root.calls)
    except FileRefused:
        return None
    except OSError as error:
        if is_transient(error):
            raise HostError("read", "/".join((base, *parts)), error.errno or 0) from error
        return None
