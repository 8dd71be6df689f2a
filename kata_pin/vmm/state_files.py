"""What Kata left on disk about a sandbox's processes: the pid file, persist.json, state.json.

Only files of root (or of our own uid) are believed, and no symlink below Kata's directories is
followed: a pid from here is a witness in the sense of DESIGN D5. Nothing is kept between calls.
Kata rewrites persist.json in place, so a half-written one reads as absent and is read next time.
Paths: Go runtime virtcontainers/persist/fs and qemu.go (-pidfile); runtime-rs crates/persist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.sandbox import ContainerState
from kata_pin.owned_file import FileRefused, read_below
from kata_pin.vmm.host_access import HostPaths
from kata_pin.wire.ids import is_id
from kata_pin.wire.kata.persist import (
    KataRuntime,
    PersistedSandbox,
    container_state,
    parse_persist,
    parse_rs_state,
)

MAX_PERSIST: Final = 4 * 1024 * 1024
MAX_PID_FILE: Final = 32

_PID: Final = re.compile(rb"[0-9]{1,10}\n?\Z")


@dataclass(frozen=True)
class KataPaths:
    """Where Kata keeps its state: the Go runtime below `vc`, runtime-rs below `kata`."""

    vc: str = "/run/vc"
    kata: str = "/run/kata"

    def main_qmp(self, sandbox_id: str) -> str:
        """Return the Go runtime's QMP socket; runtime-rs has its in the bundle and keeps it."""
        return f"{self.vc}/vm/{sandbox_id}/qmp.sock"

    def extra_monitor(self, sandbox_id: str) -> str:
        """Return the debug monitor socket (extra_monitor_socket = "qmp"), there or not."""
        return f"{self.vc}/vm/{sandbox_id}/extra-monitor.sock"


@dataclass(frozen=True)
class SandboxPids:
    """Pids that Kata's files name: the VMM's with the name of the file, virtiofsd's or 0."""

    vmm: Mapping[int, str] = field(default_factory=dict)
    virtiofsd: int = 0


def read_pids(root: HostPaths, paths: KataPaths, sandbox_id: str) -> SandboxPids:
    """Return what Kata's files say; files that are absent or not to be believed say nothing."""
    if not is_id(sandbox_id):
        return SandboxPids()
    named: dict[int, str] = {}
    pid = _pid_file(root.path(paths.vc), "vm", sandbox_id, "pid")
    if pid:
        named[pid] = "pid file"
    virtiofsd = 0
    for persisted, name in (
        (_persist(root.path(paths.vc), sandbox_id), "persist.json"),
        (_rs_state(root.path(paths.kata), sandbox_id), "state.json"),
    ):
        if persisted is not None:
            virtiofsd = virtiofsd or persisted.virtiofsd_pid
            if persisted.vmm_pid:
                named.setdefault(persisted.vmm_pid, name)
    return SandboxPids(named, virtiofsd)


def virtiofsd_pid(root: HostPaths, paths: KataPaths, sandbox_id: str) -> int:
    """Return the pid that Kata's files name, 0 for none; read again only where they changed."""
    return _virtiofsd_pid(root, paths, sandbox_id, state_stamp(root, paths, sandbox_id))


@lru_cache(maxsize=1024)
def _virtiofsd_pid(
    root: HostPaths, paths: KataPaths, sandbox_id: str, _stamp: tuple[int, int]
) -> int:
    """Every pass over a sandbox asks, and persist.json of a pod can be long."""
    return read_pids(root, paths, sandbox_id).virtiofsd


def persisted_pinning(
    root: HostPaths, paths: KataPaths, sandbox_id: str
) -> tuple[bool, str] | None:
    """Return whether Kata pins the sandbox's vCPUs too (enable_vcpus_pinning), and the file's name.

    None where there is no file to be believed, or it is being written; read only where it changed.
    """
    return _persisted_pinning(root, paths, sandbox_id, state_stamp(root, paths, sandbox_id))


@lru_cache(maxsize=1024)
def _persisted_pinning(
    root: HostPaths, paths: KataPaths, sandbox_id: str, _stamp: tuple[int, int]
) -> tuple[bool, str] | None:
    persisted = read_state(root, paths, sandbox_id)
    if persisted is None:
        return None
    name = "persist.json" if persisted.runtime is KataRuntime.GO else "state.json"
    return persisted.vcpu_pinning, name


def read_state(root: HostPaths, paths: KataPaths, sandbox_id: str) -> PersistedSandbox | None:
    """Return what Kata keeps of a sandbox; None when it keeps nothing that is to be believed."""
    if not is_id(sandbox_id):
        return None
    persisted = _persist(root.path(paths.vc), sandbox_id)
    return persisted or _rs_state(root.path(paths.kata), sandbox_id)


def state_problem(root: HostPaths, paths: KataPaths, sandbox_id: str) -> str:
    """Return why read_state gives nothing of a file that is there; empty where none is."""
    if is_id(sandbox_id):
        for base, parts, parse in (
            (paths.vc, ("sbs", sandbox_id, "persist.json"), parse_persist),
            (paths.kata, (sandbox_id, "state.json"), parse_rs_state),
        ):
            data = _read(root.path(base), *parts, limit=MAX_PERSIST)
            if data is not None:
                return _problem(parse, data)
        if any(state_stamp(root, paths, sandbox_id)):
            return f"not a file of root's of at most {MAX_PERSIST} bytes"
    return ""


def _problem(parse: Callable[[bytes], object], data: bytes) -> str:
    try:
        parse(data)
    except ParseError as error:
        return str(error)
    return ""


def state_stamp(root: HostPaths, paths: KataPaths, sandbox_id: str) -> tuple[int, int]:
    """Return modification time and size of what read_state reads; zeros where there is none."""
    if is_id(sandbox_id):
        go = f"{paths.vc}/sbs/{sandbox_id}/persist.json"
        for path in (go, f"{paths.kata}/{sandbox_id}/state.json"):
            try:
                status = os.lstat(root.path(path))
            except OSError:
                continue
            return status.st_mtime_ns, status.st_size
    return 0, 0


def read_container_state(
    root: HostPaths, paths: KataPaths, sandbox_id: str, container_id: str
) -> ContainerState:
    """Return the state that Go's runtime keeps of a container; running where none is kept."""
    if is_id(sandbox_id) and is_id(container_id):
        parts = ("sbs", sandbox_id, container_id, "persist.json")
        data = _read(root.path(paths.vc), *parts, limit=MAX_PERSIST)
        try:
            return ContainerState.RUNNING if data is None else container_state(data)
        except ParseError:
            pass
    return ContainerState.RUNNING


def _read(base: str, *parts: str, limit: int) -> bytes | None:
    """Return a file of root's or ours below `base`, None if it is absent or not to be believed."""
    try:
        return read_below(base, *parts, limit=limit)
    except (OSError, FileRefused):
        return None


def _pid_file(base: str, *parts: str) -> int:
    data = _read(base, *parts, limit=MAX_PID_FILE)
    return int(data) if data is not None and _PID.match(data) else 0


def _persist(base: str, sandbox_id: str) -> PersistedSandbox | None:
    data = _read(base, "sbs", sandbox_id, "persist.json", limit=MAX_PERSIST)
    try:
        return None if data is None else parse_persist(data)
    except ParseError:
        return None


def _rs_state(base: str, sandbox_id: str) -> PersistedSandbox | None:
    data = _read(base, sandbox_id, "state.json", limit=MAX_PERSIST)
    try:
        return None if data is None else parse_rs_state(data)
    except ParseError:
        return None
