"""A systemd unit's limits without systemd: what the shipped unit takes away is taken away here too.

    python confined.py UNIT WRITABLE GROUP COMMAND...

The values are read from the unit's [Service] section, so a changed unit changes what is applied. A
directive that is neither applied nor listed as having nothing to apply is an error. Needs root, and
libseccomp and systemd-analyze, which knows the members of `@system-service`.

Not applied: IPAddressDeny (a BPF program of the cgroup; no inet socket can be made anyway) and
KeyringMode and RemoveIPC (a keyring of its own, and IPC objects, which nothing here uses).
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

NOTHING_TO_APPLY = {
    *("Type", "ExecStart", "ExecReload", "Restart", "RestartSec", "WatchdogSec"),
    *("TimeoutStartSec", "TimeoutStopSec"),
    *("OOMScoreAdjust", "RuntimeDirectory", "RuntimeDirectoryMode", "RuntimeDirectoryPreserve"),
    *("IPAddressDeny", "KeyringMode", "RemoveIPC"),
    *("MemoryMax", "MemorySwapMax", "TasksMax"),
    *("ProtectKernelModules", "ProtectClock"),  # by the capabilities they leave out
    "SystemCallErrorNumber",  # read with the filter
    "SystemCallArchitectures",  # libseccomp ends what is of another architecture
    "RemoveIPC",  # when the service has ended, of a user of its own
}
BY_MOUNTS = {
    *("ProtectSystem", "ProtectHome", "ProtectControlGroups", "ProtectKernelTunables"),
    *("ProtectKernelLogs", "ProtectHostname", "PrivateTmp", "PrivateDevices"),
    *("PrivateMounts", "BindReadOnlyPaths"),
}
BY_PRIVILEGES = {
    *("CapabilityBoundingSet", "AmbientCapabilities", "NoNewPrivileges", "User", "Group"),
    *("UMask", "LimitNOFILE"),
}
BY_FILTER = {
    *("RestrictAddressFamilies", "SystemCallFilter", "RestrictNamespaces", "RestrictRealtime"),
    *("LockPersonality", "RestrictSUIDSGID", "MemoryDenyWriteExecute"),
}

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
USER = "nobody"  # in the stead of the user that the unit names

ALLOW = 0x7FFF0000
DENY = 0x00050000  # | errno
NOT_EQUAL, EQUAL, MASKED_EQUAL, GREATER = 1, 4, 7, 6  # enum scmp_compare

Unit = dict[str, str]


def read_unit(path: Path) -> Unit:
    """Return the [Service] section; raises ValueError for a directive nobody deals with."""
    unit: Unit = {}
    section = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            unit[name] = f"{unit[name]}\n{value}" if name == "SystemCallFilter" in unit else value
    unknown = unit.keys() - NOTHING_TO_APPLY - BY_MOUNTS - BY_PRIVILEGES - BY_FILTER
    if unknown:
        raise ValueError(f"{path}: nothing here applies {', '.join(sorted(unknown))}")
    return unit


def command(unit: Path, writable: Path, group: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs another one under the unit's limits."""
    return [sys.executable, __file__, str(unit), str(writable), group, *arguments]


# ---- mounts --------------------------------------------------------------------------------


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()):
        code = ctypes.get_errno()
        raise OSError(code, f"mount {target}: {os.strerror(code)}")


def _read_only(path: str) -> None:
    """Make a tree read-only, the mounts below it too."""
    libc = ctypes.CDLL(None, use_errno=True)
    # struct mount_attr of mount_setattr(2): attr_set, attr_clr, propagation, userns_fd
    attributes = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # MOUNT_ATTR_RDONLY
    if libc.syscall(442, -100, path.encode(), 0x8000, ctypes.byref(attributes), 32):
        code = ctypes.get_errno()
        raise OSError(code, f"mount_setattr {path}: {os.strerror(code)}")


def apply_mounts(unit: Unit, writable: str) -> None:
    """Make the mount namespace that the unit asks for; `writable` is its runtime directory."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_names = 0x00020000, 0x04000000  # CLONE_NEWNS, CLONE_NEWUTS
    hostname = new_names if unit.get("ProtectHostname") == "yes" else 0
    if libc.unshare(new_mounts | hostname):
        raise OSError(ctypes.get_errno(), "unshare")
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    own = (writable, "/run/kata-pin")  # the unit's RuntimeDirectory: the node's lock is there
    os.makedirs(own[1], exist_ok=True)
    for path in own:
        _mount(path, path, "", MS_BIND)
    if unit.get("PrivateTmp") == "yes":
        for folder in ("/tmp", "/var/tmp"):
            _empty(folder, mode="1777")
    if unit.get("PrivateDevices") == "yes":
        _private_devices()
    if unit.get("ProtectSystem") == "strict":
        kept = (*own, "/tmp", "/var/tmp", "/dev", "/proc", "/sys")
        for path in ("/", *sorted(_mount_points())):
            if not any(path == one or path.startswith(f"{one}/") for one in kept):
                _remount_read_only(path)
    if unit.get("ProtectHome") == "tmpfs":
        for folder in ("/home", "/root"):
            _empty(folder)
        for folder in unit["BindReadOnlyPaths"].split():
            if os.path.isdir(folder.removeprefix("-")):
                _mount(folder.removeprefix("-"), folder.removeprefix("-"), "", MS_BIND | MS_REC)
                _read_only(folder.removeprefix("-"))
    if unit.get("ProtectKernelTunables") == "yes":
        for path in ("/proc/sys", "/proc/irq", "/proc/fs", "/sys"):
            _mount(path, path, "", MS_BIND | MS_REC)
            _read_only(path)
    if unit.get("ProtectControlGroups") == "yes":
        _read_only("/sys/fs/cgroup")
    if unit.get("ProtectKernelLogs") == "yes":
        _mount("/dev/null", "/proc/kmsg", "", MS_BIND)


def _empty(folder: str, mode: str = "755") -> None:
    """Hide a folder but for this project, which may lie below it: an installed one never does."""
    project = Path(__file__).resolve().parents[2]
    descriptor = os.open(project, os.O_PATH)
    _mount("tmpfs", folder, "tmpfs", 0, f"mode={mode}")
    if project.is_relative_to(folder):
        project.mkdir(parents=True)
        _mount(f"/proc/self/fd/{descriptor}", str(project), "", MS_BIND | MS_REC)
    os.close(descriptor)


def _mount_points() -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        yield line.split()[4]


def _remount_read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(1, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(442, -100, path.encode(), 0, ctypes.byref(attributes), 32):
        code = ctypes.get_errno()
        if code not in {errno.ENOENT, errno.EINVAL}:  # hidden by a later mount
            raise OSError(code, f"mount_setattr {path}: {os.strerror(code)}")


def _private_devices() -> None:
    names = ("null", "zero", "full", "random", "urandom", "tty")
    opened = [(name, os.open(f"/dev/{name}", os.O_PATH)) for name in names]
    _mount("tmpfs", "/dev", "tmpfs", 0, "mode=755")
    for name, descriptor in opened:
        Path(f"/dev/{name}").touch()
        _mount(f"/proc/self/fd/{descriptor}", f"/dev/{name}", "", MS_BIND)
        os.close(descriptor)
    Path("/dev/shm").mkdir()
    _mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777")


# ---- privileges ----------------------------------------------------------------------------


def drop_privileges(unit: Unit, group: str) -> list[str]:
    """Apply umask and limits; return the prefix that drops the capabilities."""
    os.umask(int(unit["UMask"], 8))
    files = min(int(unit["LimitNOFILE"]), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    bounds = _capabilities(unit["CapabilityBoundingSet"])
    ambient = _capabilities(unit["AmbientCapabilities"])
    prefix = ["setpriv", f"--reuid={USER}", f"--regid={group}", "--clear-groups"]
    prefix += [f"--bounding-set={bounds}", f"--inh-caps={ambient}", f"--ambient-caps={ambient}"]
    return [*prefix, "--no-new-privs"] if unit["NoNewPrivileges"] == "yes" else prefix


def _capabilities(names: str) -> str:
    """Return capabilities as setpriv takes them, none but these."""
    kept = [name.removeprefix("CAP_").lower() for name in names.split()]
    return ",".join(["-all", *(f"+{name}" for name in kept)])


# ---- system calls --------------------------------------------------------------------------


def allowed_calls(filter_: str) -> set[str]:
    """Return the system calls that a SystemCallFilter allows: lines in order, `~` takes away."""
    names: set[str] = set()
    for line in filter_.splitlines():
        listed = _named_calls(line.removeprefix("~"))
        names = names - listed if line.startswith("~") else names | listed
    return names


def _named_calls(words: str) -> set[str]:
    """Return the system calls that a line names, its sets resolved."""
    names: set[str] = set()
    for word in words.split():
        if not word.startswith("@"):
            names.add(word)
            continue
        listed = subprocess.run(
            ["systemd-analyze", "syscall-filter", word], capture_output=True, text=True, check=True
        )
        members = [line.strip() for line in listed.stdout.splitlines()[1:]]
        names |= _named_calls(" ".join(m for m in members if m and not m.startswith("#")))
    return names


class _Argument(ctypes.Structure):
    """struct scmp_arg_cmp of libseccomp."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def load_filter(unit: Unit) -> None:
    """Install the unit's filters on this process; they stay over execve."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    add: Callable[..., int] = library.seccomp_rule_add_array
    deny = DENY | getattr(errno, unit["SystemCallErrorNumber"])
    allowed = allowed_calls(unit["SystemCallFilter"])

    def install(default: int, rules: Sequence[tuple[int, str, tuple[_Argument, ...]]]) -> None:
        context = ctypes.c_void_p(library.seccomp_init(default))
        for action, name, arguments in rules:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number < 0:
                continue  # of another architecture, or newer than the library
            array = (_Argument * len(arguments))(*arguments)
            code = add(context, action, number, len(arguments), array)
            if code:
                raise OSError(-code, f"seccomp rule for {name}")
        if library.seccomp_load(context):
            raise OSError(errno.EINVAL, "seccomp_load")

    restrictions: list[tuple[int, str, tuple[_Argument, ...]]] = []
    families = [getattr(socket, name) for name in unit["RestrictAddressFamilies"].split()]
    unsupported = DENY | errno.EAFNOSUPPORT
    for low, high in zip([-1, *sorted(families)], [*sorted(families), 0], strict=True):
        restrictions += [
            (unsupported, "socket", (_Argument(0, EQUAL, family, 0),))
            for family in range(low + 1, high)
        ]
    beyond = _Argument(0, GREATER, max(families), 0)
    restrictions.append((unsupported, "socket", (beyond,)))
    denied = DENY | errno.EPERM
    if unit.get("RestrictNamespaces") == "yes":
        restrictions += [(denied, "unshare", ()), (denied, "setns", ())]
        restrictions.append((DENY | errno.ENOSYS, "clone3", ()))  # its flags cannot be looked at
        for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
            restrictions.append((denied, "clone", (_Argument(0, MASKED_EQUAL, flag, flag),)))
    if unit.get("RestrictRealtime") == "yes":
        restrictions += [
            (denied, "sched_setscheduler", (_Argument(1, EQUAL, policy, 0),)) for policy in (1, 2)
        ]
    if unit.get("MemoryDenyWriteExecute") == "yes":  # as systemd.exec(5) says; SHM_EXEC
        restrictions.append((denied, "mmap", (_Argument(2, MASKED_EQUAL, 6, 6),)))
        restrictions.append((denied, "shmat", (_Argument(2, MASKED_EQUAL, 0o100000, 0o100000),)))
        for name in ("mprotect", "pkey_mprotect"):
            restrictions.append((denied, name, (_Argument(2, MASKED_EQUAL, 4, 4),)))
    if unit.get("LockPersonality") == "yes":
        restrictions.append((denied, "personality", (_Argument(0, NOT_EQUAL, 0, 0),)))
    if unit.get("RestrictSUIDSGID") == "yes":
        for bit in (0o4000, 0o2000):
            restrictions.append((denied, "chmod", (_Argument(1, MASKED_EQUAL, bit, bit),)))
            restrictions.append((denied, "fchmodat", (_Argument(2, MASKED_EQUAL, bit, bit),)))
    install(ALLOW, restrictions)
    install(deny, [(ALLOW, name, ()) for name in sorted(allowed | {"seccomp", "prctl"})])


def main(arguments: list[str]) -> None:
    """Apply mounts, then privileges, then filters: each needs what the next takes away."""
    stage, *rest = arguments
    if stage == "--filter":
        unit = read_unit(Path(rest[0]))
        load_filter(unit)
        os.execvp(rest[1], rest[1:])
    writable, group, *wanted = rest
    unit = read_unit(Path(stage))
    apply_mounts(unit, writable)
    prefix = drop_privileges(unit, group)
    os.execvp(prefix[0], [*prefix, sys.executable, __file__, "--filter", stage, *wanted])


if __name__ == "__main__":
    main(sys.argv[1:])
