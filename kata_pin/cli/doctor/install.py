"""`doctor` on what `kata-pin install` leaves on the node, hooks, the kubelet and other programs.

A node that runs kata-pin in another way (scripts/demo, a package of its own) has nothing to check.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import grp
import os
import pwd
from collections.abc import Iterator
from typing import Final

from kata_pin.base.config.tree import Config
from kata_pin.base.cpuset import CpuSet, named_pcpus, union
from kata_pin.base.documents.state import Row, State
from kata_pin.base.errors import KataPinError
from kata_pin.base.values import Remedy, RowStatus, count, here, listed
from kata_pin.cli.node.changes import MANIFEST, NodeFiles
from kata_pin.cli.node.containerd import named_specs
from kata_pin.cli.node.files import CONTAINERD_FRAGMENT, HOOK_PATH, SPECS
from kata_pin.cli.reports import who, words
from kata_pin.linux.files import HOST, read_text
from kata_pin.linux.process import cgroups
from kata_pin.peers.kubelet.checkpoint import read_claims, read_kubelet

SHOWN: Final = 3
"""Files named in a row."""

HOOK_FILES: Final = (
    "/etc/containers/oci/hooks.d/*.json",
    "/usr/share/containers/oci/hooks.d/*.json",
    "/run/containers/oci/hooks.d/*.json",
    "/etc/containerd/*.json",
    f"{SPECS}*.json",
)
"""Where CRI-O, podman and a base runtime spec of containerd may name our hook."""

HOOK_NAME: Final = "kata-pin-hook"


def installation(config: Config, node: NodeFiles | None = None) -> Iterator[Row]:
    """Yield whether the installed files are there, and the group and the runtime directory."""
    installed = node or NodeFiles()
    if not installed.installed:
        yield Row("installation", "info", f"no {MANIFEST}: not installed by kata-pin install")
        return
    missing, modified = installed.altered()
    if missing:
        remedy = "run kata-pin install again with the same options"
        yield Row("installation", "fail", f"{_named(missing)} missing", remedy)
    elif modified:
        yield Row("installation", "info", f"{_named(modified)} modified since: kept by install")
    else:
        yield Row("installation", "ok", "all installed files are in place")
    yield user(config.user)
    yield group(config.group)
    yield runtime_dir(config.runtime_dir)


def user(name: str) -> Row:
    """Return whether the unprivileged user exists that the daemon becomes."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        text = f"no user {name}: the daemon runs as nobody, as other services may"
        return Row("user", "warn", text, "systemd-sysusers, then restart kata-pin")
    return Row("user", "ok", f"the daemon runs as {name}")


def group(name: str) -> Row:
    """Return whether the group that may read the state exists: the unit needs it to start."""
    try:
        grp.getgrnam(name)
    except KeyError:
        return Row("group", "fail", f"no group {name}", "systemd-sysusers")
    return Row("group", "ok", f"members of {name} may read the state")


def runtime_dir(path: str) -> Row:
    """Return whether the directory of the sockets exists: hooks spool into it at any time."""
    if not os.path.isdir(path):
        text = f"{path} does not exist: hooks cannot leave messages"
        return Row("runtime directory", "fail", text, "systemd-tmpfiles --create kata-pin.conf")
    return Row("runtime directory", "ok", path)


def hooks(
    patterns: tuple[str, ...] = HOOK_FILES,
    program: str = HOOK_PATH,
    fragment: str = CONTAINERD_FRAGMENT,
    specs: str = SPECS,
    *,
    by_nri: bool = False,
) -> Row:
    """Return the files that name the hook, and whether the hook is executable.

    `specs` is the folder of specs that do nothing until containerd's configuration names them.
    `by_nri`: NRI reports the containers, so none is needed.
    """
    found = [
        path
        for pattern in patterns
        for path in sorted(glob.glob(pattern))
        if HOOK_NAME in _text(path)
    ]
    if found and not os.access(program, os.X_OK):
        text = f"{', '.join(found)} name the hook, but {program} is not executable"
        return Row("hooks", "fail", text, "kata-pin install")
    idle = [path for path in found if path.startswith(specs)]
    if idle:
        named = named_specs(lambda path: _text(path).encode())
        idle = [path for path in idle if path not in named and "" not in named]
    if idle:
        text = f"containerd's configuration does not name {', '.join(idle)}"
        remedy = "kata-pin install --containerd says which line is missing"
        return Row("hooks", "warn", text, remedy)
    if found:
        return Row("hooks", "ok", f"installed: {', '.join(found)}")
    text = f"no runtime runs the hook: no file names {HOOK_NAME} in {', '.join(patterns)}"
    if os.path.exists(fragment):
        remedy = "kata-pin install --containerd, with --handler NAME if Kata's has another name"
        return Row("hooks", "warn", text, remedy)
    if by_nri:
        return Row("hooks", "ok", "none, and none needed: NRI reports containers")
    return Row("hooks", "warn", text, here(words.HOOKS))


def _text(path: str) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""


def _named(paths: list[str]) -> str:
    return f"{count(len(paths), 'file')} ({listed(paths, SHOWN)})"


def kubelet(config: Config) -> Row:
    """Return the state of the kubelet's checkpoint."""
    path = config.paths.kubelet_state
    try:
        found = read_kubelet(path)
    except KataPinError as error:
        return Row("kubelet", "warn", f"checkpoint not used: {error.message}", error.hint)
    if found is None:
        return Row("kubelet", "info", f"no checkpoint at {path}: exclusive CPUs are inferred")
    pods = found.pod_entries
    own = sum(len(containers) for uid, containers in found.entries.items() if uid not in pods)
    held = f"{count(own, 'container')} with exclusive CPUs"
    held += f", {count(len(pods), 'pod')} with pod-level CPUs" if pods else ""
    text = f"policy {found.policy}, default set {found.default}, {held}"
    if found.doubles:
        twice = "; ".join(map(words.double_assignment, found.doubles))
        return Row("kubelet", "warn", f"{text}; {twice}", words.DOUBLE_REMEDY)
    return Row("kubelet", "ok", text)


def pod_resources(config: Config) -> Iterator[Row]:
    """Yield whether the kubelet's own list of exclusive CPUs is that of its checkpoint.

    Nothing where the kubelet has no such socket, or no static policy. Init containers are in the
    checkpoint only.
    """
    from kata_pin.peers.kubelet.pods import read_pod_resources

    state = config.paths.kubelet_state
    path = os.path.join(os.path.dirname(state), "pod-resources", "kubelet.sock")
    try:
        known = read_kubelet(state)
        if known is None or known.policy != "static" or not os.path.exists(path):
            return
        listed = asyncio.run(read_pod_resources(path))
    except KataPinError as error:
        yield Row("pod resources", "info", f"not compared: {error.message}", error.hint)
        return
    recorded = {
        (name, cpus) for containers in known.entries.values() for name, cpus in containers.items()
    }
    wrong = [
        f"{container} has {cpus}"
        for container, cpus in sorted(listed.containers.items())
        if (container.rpartition("/")[2], cpus) not in recorded
    ]
    if wrong:
        text = f"the kubelet lists what its checkpoint does not have: {'; '.join(wrong[:3])}"
        remedy = "run doctor again; if it stays, see the kubelet's log"
        yield Row("pod resources", "warn", text, remedy)
        return
    held = union((*(cpus for _, cpus in recorded), *known.pod_entries.values()))
    free = len(listed.allocatable - held)
    text = f"as the checkpoint; {free} of {len(listed.allocatable)} allocatable pCPUs are free"
    yield Row("pod resources", "ok", text)


def dra_claims(config: Config) -> Iterator[Row]:
    """Yield what DRA claims give, and whether the kubelet gives CPUs beside them.

    Nothing where there are none: the driver for CPUs runs on few nodes.
    """
    folder = config.paths.cdi
    try:
        found, problem = read_claims(folder)
    except KataPinError as error:
        yield Row("DRA claims", "warn", f"not read: {error.message}", error.hint)
        return
    if problem:
        yield Row("DRA claims", "warn", f"not all read: {problem}")
    if not found:
        return
    cpus = union(found.values())
    text = f"{count(len(found), 'claim')} of {named_pcpus(cpus)}"
    try:
        kubelet_state = read_kubelet(config.paths.kubelet_state)
    except KataPinError:  # has a row of its own
        kubelet_state = None
    if kubelet_state is None or not kubelet_state.static:
        yield Row("DRA claims", "ok", text)
        return
    entries = (cpus for of in kubelet_state.entries.values() for cpus in of.values())
    held = union((*entries, *kubelet_state.pod_entries.values()))
    both = f"; {named_pcpus(cpus & held)} given by both" if cpus & held else ""
    text += f", beside the kubelet's static policy, which knows nothing of them{both}"
    remedy = "cpuManagerPolicy: none in the kubelet's configuration, or no DRA driver for CPUs here"
    yield Row("DRA claims", "warn", text, remedy)


RUNTIMES: Final = frozenset({"containerd", "crio", "kubelet"})
STARTERS: Final = frozenset({"containerd", "crio", "dockerd"})
"""Programs that start shims; the kubelet starts none."""

_SHIM: Final = "containerd-shi"
"""What the name of a shim starts with; the kernel keeps 15 bytes."""

_NARROW: Final = Remedy(
    "remove AllowedCPUs= and CPUAffinity= from its unit and the slices above (systemctl show), and "
    "CPUAffinity= from /etc/systemd/system.conf, then restart it",
    "on the node: remove AllowedCPUs= and CPUAffinity= from its unit and the slices above, and "
    "CPUAffinity= from /etc/systemd/system.conf, then restart it",
)

_WATCHED: Final[dict[str, tuple[RowStatus, str, Remedy]]] = {
    "irqbalance": (
        "info",
        "moves interrupts, also to exclusive CPUs",
        Remedy("ban these CPUs by IRQBALANCE_BANNED_CPULIST"),
    ),
    "tuned": (
        "info",
        "its scheduler plugin can set affinities",
        Remedy("keep VMMs out of its scheduler groups; kata-pin check shows drift"),
    ),
    "numad": (
        "warn",
        "sets affinities of large processes",
        Remedy("systemctl disable --now numad", "on the node: systemctl disable --now numad"),
    ),
    "kata-pin": (
        "warn",
        "not the daemon that answers here; two daemons set the same affinities",
        words.OTHER_DAEMON,
    ),
}
"""Status, effect and remedy of programs that interfere, by their process name."""

_UNANSWERED: Final[tuple[RowStatus, str, Remedy]] = (
    "info",
    "does not answer here: it is starting or stopping, or has another runtime_dir",
    words.STATUS,
)
"""The same for a daemon where none answers: it may be this node's only one."""


def programs(state: State | None) -> Iterator[Row]:
    """Yield a row for the runtimes that are running, and one per program that interferes."""
    found: dict[str, list[str]] = {}
    for process in who.every_process():
        name = process.comm
        if name in RUNTIMES or (name in _WATCHED and not _is_own(name, process.pid, state)):
            since = words.age(who.described(process).age_s)
            found.setdefault(name, []).append(f"pid {process.pid}, started {since} ago")
    listed = {name: f"{name} ({'; '.join(pids)})" for name, pids in sorted(found.items())}
    runtimes = [text for name, text in listed.items() if name in RUNTIMES]
    none = f"not running: {', '.join(sorted(RUNTIMES))}"
    yield Row("programs", "ok" if runtimes else "info", ", ".join(runtimes) or none)
    interfering = dict(_WATCHED)
    if state is None or not state.daemon.running:
        interfering["kata-pin"] = _UNANSWERED
    for name, (status, effect, remedy) in interfering.items():
        if name in listed:
            yield Row("programs", status, f"{listed[name]}: {effect}", here(remedy))


def narrow_runtimes(usual: CpuSet, *, shims: bool = True) -> Iterator[Row]:
    """Yield the container runtimes and shims that may not run on all of the usual pCPUs.

    Shims in a pod's cgroup may be narrower; what a runtime has, the shims and VMs that it starts
    inherit. `usual` are those online and not isolated, which a program may use by default. `shims`
    is False where the setting overhead_roles gives shims CPUs of their own.
    """
    for process in who.every_process():
        if process.comm not in STARTERS and not (shims and process.comm.startswith(_SHIM)):
            continue
        with contextlib.suppress(OSError, KataPinError):  # it has ended
            groups = cgroups(HOST, process.pid)
            allowed = CpuSet(os.sched_getaffinity(process.pid))
            if usual <= allowed or any("kubepods" in entry.path for entry in groups.entries):
                continue
            text = (
                f"{process.comm} (pid {process.pid}) may run on {allowed} only, not on"
                f" {usual - allowed}: VMs that it starts inherit that, and Kata refuses more vCPUs"
                f" than these {len(allowed)}"
            )
            yield Row("programs", "warn", text, here(_NARROW))


def _is_own(name: str, pid: int, state: State | None) -> bool:
    """Return whether a process is kata-pin, but no second daemon.

    A daemon that hangs cannot say its pid: it has a row of its own.
    """
    if name != "kata-pin":
        return False
    if state is not None and state.daemon.silent:
        return True
    daemon = state.daemon.pid if state is not None else None
    return pid in {daemon, os.getpid()} or "run" not in who.command(pid).split()
