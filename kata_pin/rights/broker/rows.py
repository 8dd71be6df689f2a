"""The table of operations: all that the daemon may ask its broker for (docs/broker.md).

A row names an operation by its intent, and its arguments by kind; no argument is a path. Where a
row is about a file, a folder or a socket, the broker makes the path of one of its settings (`base`)
and of ids. Both ends have this table: the daemon packs arguments by it, the broker checks them.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Final, NamedTuple

from kata_pin.rights.broker.protocol import Settings

ANY: Final = 0xFFFF_FFFF

_NUMBER: Final = struct.Struct("=I")
_LENGTH: Final = struct.Struct("=H")


class Number(NamedTuple):
    """An argument: a number from 0 to `most`."""

    name: str
    most: int = ANY


class TextArgument(NamedTuple):
    """An argument: ASCII that fits a pattern as a whole."""

    name: str
    pattern: str


class Rest(NamedTuple):
    """The last argument: bytes that the operation checks itself."""

    name: str


Argument = Number | TextArgument | Rest
Value = int | str | bytes

_ID: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"
SANDBOX: Final = TextArgument("sandbox", _ID)
CONTAINER: Final = TextArgument("container", _ID)
NAMESPACE: Final = TextArgument("namespace", _ID)
PROGRAM: Final = TextArgument("program", r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
DRIVER: Final = TextArgument("driver", r"[a-z]{2,16}")
SPEC: Final = TextArgument("spec", r"[A-Za-z0-9_][A-Za-z0-9_.@:=-]{0,249}")
FILE: Final = TextArgument("file", r"exe|cmdline|maps|numa_maps")
CLASS: Final = TextArgument("class", r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,199})?")
GROUP: Final = TextArgument("group", r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,199})?")
BANNED: Final = TextArgument("banned", r"\?|=([0-9]{1,4}(?:[-,][0-9]{1,4}){0,4096})?")
KIND: Final = TextArgument("kind", r"reader|mover|monitor")
MONITOR: Final = TextArgument("monitor", r"qmp|extra-monitor")
PID: Final = Number("pid", 0x7FFF_FFFF)
LIMIT: Final = Number("limit", 4 * 1024 * 1024)
ROOT: Final = Number("root", 255)
BASE: Final = Number("base", 1)
PLACE: Final = Number("place", 3)
ABOVE: Final = Number("above", 64)
PATTERN: Final = Number("pattern", 0xFFFF)
CPU: Final = Number("cpu", 8191)
MASK: Final = Number("mask")
TOKEN: Final = Number("token", 0x7FFF_FFFF)
EXECS: Final = Number("execs", 1)
GREETING: Final = Number("greeting_ms", 1000)
SESSION: Final = Number("session_ms", 5000)
POLICY: Final = Number("policy", 6)
PRIORITY: Final = Number("priority", 99)


class Row(NamedTuple):
    """One operation. `base` and `path`: of which file; `feature`: served only while that is on."""

    name: str
    does: str
    arguments: tuple[Argument, ...] = ()
    base: str = ""
    path: str = ""
    feature: str = ""

    def pack(self, values: Mapping[str, Value]) -> bytes:
        """Return the arguments' bytes."""
        data = b""
        for argument in self.arguments:
            value = values[argument.name]
            if isinstance(value, int):
                data += _NUMBER.pack(value)
            else:
                text = value.encode("ascii") if isinstance(value, str) else value
                data += text if isinstance(argument, Rest) else _LENGTH.pack(len(text)) + text
        return data

    def parse(self, data: bytes) -> dict[str, Value]:
        """Return the arguments by name; ValueError or struct.error where one is not allowed."""
        values: dict[str, Value] = {}
        at = 0
        for argument in self.arguments:
            if isinstance(argument, Number):
                (number,) = _NUMBER.unpack_from(data, at)
                at += _NUMBER.size
                if number > argument.most:
                    raise ValueError(f"no such {argument.name}")
                values[argument.name] = number
            elif isinstance(argument, TextArgument):
                (length,) = _LENGTH.unpack_from(data, at)
                at += _LENGTH.size + length
                text = data[at - length : at].decode("ascii")
                if len(text) != length or not re.fullmatch(argument.pattern, text):
                    raise ValueError(f"no such {argument.name}")
                values[argument.name] = text
            else:
                values[argument.name], at = data[at:], len(data)
        if at != len(data):
            raise ValueError("longer than its arguments")
        return values

    def parts(self, values: Mapping[str, Value]) -> tuple[str, ...]:
        """Return the names below the base."""
        return tuple(self.path.format_map(values).split("/")) if self.path else ()


FILE_ROW: Final = "file"
FOLDERS_ROW: Final = "folders"
NAMES_ROW: Final = "names"
WATCH_ROW: Final = "watch"
AGENT_ROW: Final = "agent"
SERVER_ROW: Final = "server"
MONITOR_ROW: Final = "monitor"
CHILD_ROW: Final = "child"
CALL_ROW: Final = "call"

_TASK: Final = "io.containerd.runtime.v2.task/{namespace}/{container}/config.json"

ROWS: Final = (
    # Files: status, and at most `limit` bytes of a regular file of root's.
    Row("bundle-config", FILE_ROW, (LIMIT, ROOT, CONTAINER), "root", "{container}/config.json"),
    Row(
        *("bundle-config-containerd", FILE_ROW, (LIMIT, ROOT, NAMESPACE, CONTAINER)),
        *("root", _TASK),
    ),
    Row(
        *("bundle-config-docker", FILE_ROW, (LIMIT, ROOT, NAMESPACE, CONTAINER)),
        *("root", f"daemon/{_TASK}"),
    ),
    Row(
        *("bundle-config-crio", FILE_ROW, (LIMIT, ROOT, DRIVER, CONTAINER)),
        *("root", "{driver}-containers/{container}/userdata/config.json"),
    ),
    Row(
        *("bundle-config-userdata", FILE_ROW, (LIMIT, ROOT, CONTAINER)),
        *("root", "{container}/userdata/config.json"),
    ),
    Row("sandbox-state-go", FILE_ROW, (LIMIT, SANDBOX), "vc", "sbs/{sandbox}/persist.json"),
    Row(
        *("container-state-go", FILE_ROW, (LIMIT, SANDBOX, CONTAINER)),
        *("vc", "sbs/{sandbox}/{container}/persist.json"),
    ),
    Row("sandbox-state-rust", FILE_ROW, (LIMIT, SANDBOX), "kata", "{sandbox}/state.json"),
    Row("vmm-pid", FILE_ROW, (LIMIT, SANDBOX), "vc", "vm/{sandbox}/pid"),
    Row(
        *("jailed-vmm-pid", FILE_ROW, (LIMIT, PROGRAM, SANDBOX)),
        *("vc", "{program}/{sandbox}/root/{program}.pid"),
    ),
    Row("monitor-socket", FILE_ROW, (LIMIT, SANDBOX, MONITOR), "vc", "vm/{sandbox}/{monitor}.sock"),
    Row("kubelet-checkpoint", FILE_ROW, (LIMIT,), "kubelet", "{checkpoint}"),
    Row("cpu-claim", FILE_ROW, (LIMIT, SPEC), "cdi", "{spec}.json"),
    # Folders: the names in them, and what they are.
    Row("sandboxes-go", FOLDERS_ROW, (), "vc", "sbs"),
    Row("sandboxes-rust", FOLDERS_ROW, (), "kata"),
    Row("cpu-claims", NAMES_ROW, (), "cdi"),
    Row("folder-status", CALL_ROW, (PLACE, ABOVE)),
    # Watches, with a descriptor of inotify.
    Row("watch-sandbox-go", WATCH_ROW, (MASK, SANDBOX), "vc", "sbs/{sandbox}"),
    Row("watch-sandbox-rust", WATCH_ROW, (MASK, SANDBOX), "kata", "{sandbox}"),
    Row("watch-folder", CALL_ROW, (MASK, PLACE, ABOVE)),
    # Connections. Agents' sockets are those that Kata's Go runtime names in its state. They are
    # served without `guest.enabled` too: what guests were told is then undone.
    Row("agent-cloud-hypervisor", AGENT_ROW, (SANDBOX,), "vc", "vm/{sandbox}/clh.sock"),
    Row(
        *("agent-firecracker", AGENT_ROW, (PROGRAM, SANDBOX)),
        *("vc", "{program}/{sandbox}/root/kata.hvsock"),
    ),
    Row("nri", SERVER_ROW, (), "nri", "", "nri"),
    Row("cri", SERVER_ROW, (), "cri", "", "cri"),
    Row("pods", SERVER_ROW, (), "pods", "", "pods"),
    Row("process-events", CALL_ROW, (TOKEN, EXECS), feature="thread_events"),
    Row("irqbalance", CALL_ROW, (PID, BANNED), feature="quiet"),
    # Processes and threads.
    Row("affinities", CALL_ROW, (Rest("changes"),)),
    Row("executable", CALL_ROW, (PID,)),
    Row("executables", CALL_ROW, (Rest("pids"),)),
    Row("program", CALL_ROW, (PATTERN, TextArgument("program", f"({PROGRAM.pattern})?"))),
    Row("verify-jail", CALL_ROW, (PID, BASE, PROGRAM, SANDBOX)),
    Row("kvm-vcpus", CALL_ROW, (PID,)),
    Row("descriptors", CALL_ROW, (PID,)),
    Row("switches", CALL_ROW, (CPU,)),
    Row("classes", CALL_ROW, (POLICY, PRIORITY, Rest("changes"))),
    # Kernel values, while their setting is on.
    Row("make-group", CALL_ROW, (CLASS, GROUP), feature="resctrl"),
    Row("join-group", CALL_ROW, (CLASS, GROUP, Rest("changes")), feature="resctrl"),
    Row("remove-group", CALL_ROW, (CLASS, GROUP)),
    Row("tunables", CALL_ROW, (Rest("writes"),), feature="quiet"),
    # Children: calls that may never end.
    Row("child", CALL_ROW, (KIND,)),
    Row("end-child", CALL_ROW, (PID,)),
    Row("slow-file", CHILD_ROW, (LIMIT, PID, FILE)),
    Row("system-calls", CHILD_ROW, (PID, Rest("tids"))),
    Row("move-pages", CHILD_ROW, (Rest("window"),), feature="memory"),
    Row(
        *("vcpu-list", MONITOR_ROW, (SANDBOX, MONITOR, GREETING, SESSION)),
        *("vc", "vm/{sandbox}/{monitor}.sock", "qmp"),
    ),
)  # fmt: skip

NUMBERS: Final = {row.name: number for number, row in enumerate(ROWS)}
BY_NAME: Final = {row.name: row for row in ROWS}

PLACES: Final = (("vc", "sbs"), ("kata", ""), ("cdi", ""), ("kubelet", ""))
"""The folders that are watched, and the ancestors of those that are missing, by their number."""


class Found(NamedTuple):
    """A row that is about a path, and its arguments."""

    row: Row
    values: dict[str, Value]


class Finder:
    """Finds the row of a path, on the daemon's side, which has paths of its own settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._patterns = [
            (row, root, re.compile(f"{re.escape(spelled)}{_pattern(row, settings.checkpoint)}"))
            for row in ROWS
            if row.base
            for root, base in enumerate(settings.bases(row.base))
            for spelled in {base, os.path.realpath(base)}
        ]

    def find(self, does: str, path: str) -> Found | None:
        """Return the row of a kind for a path; None where the broker has none for it."""
        for row, root, pattern in self._patterns:
            match = pattern.fullmatch(path) if row.does == does else None
            if match is not None:
                values: dict[str, Value] = {
                    argument.name: match[argument.name]
                    for argument in row.arguments
                    if argument.name in pattern.groupindex
                }
                return Found(row, values | ({"root": root} if row.base == "root" else {}))
        return None

    def find_place(self, path: str) -> dict[str, Value] | None:
        """Return the arguments place and above for one of PLACES, or a folder above one."""
        for number, place in enumerate(folders(self._settings)):
            for above, folder in enumerate(_upwards(place)):
                if folder == path:
                    return {"place": number, "above": above}
        return None

    def find_program(self, path: str) -> dict[str, Value] | None:
        """Return the arguments pattern and program for a VMM or shim, or the folder of one."""
        where, name = os.path.split(path)
        for number, (folder, pattern) in enumerate(programs(self._settings)):
            if folder == where and fnmatchcase(name, pattern):
                return {"pattern": number, "program": name}
            if folder == path:
                return {"pattern": number, "program": ""}
        return None


def programs(settings: Settings) -> list[tuple[str, str]]:
    """Return folder and pattern of each program that is looked at, VMMs first."""
    return [os.path.split(path) for path in (*settings.vmms, *settings.shims)]


def folders(settings: Settings) -> Iterator[str]:
    """Yield the folders of PLACES."""
    for base, name in PLACES:
        yield from (f"{path}/{name}".rstrip("/") for path in settings.bases(base))


def above(folder: str, count: int) -> str:
    """Return the folder so many levels above another one, at most the root."""
    return [*_upwards(folder)][: count + 1][-1]


def _upwards(folder: str) -> Iterator[str]:
    while folder not in {"", "/"}:
        yield folder
        folder = os.path.dirname(folder)
    yield "/"


def is_bundle(names: Sequence[str]) -> bool:
    """Whether names below a bundle root are those of a runtime's bundle."""
    path = f"/{'/'.join(names)}/config.json"
    return any(pattern.fullmatch(path) for pattern in _bundles())


@cache
def _bundles() -> list[re.Pattern[str]]:
    return [re.compile(_pattern(row, "")) for row in ROWS if row.base == "root"]


def _pattern(row: Row, checkpoint: str) -> str:
    """Return what follows the base in a path of a row, as a regular expression."""
    if not row.path:
        return ""
    text = f"/{re.escape(row.path)}".replace(r"\{checkpoint\}", re.escape(checkpoint))
    for argument in row.arguments:
        if isinstance(argument, TextArgument):
            name = argument.name
            text = text.replace(rf"\{{{name}\}}", f"(?P<{name}>{argument.pattern})", 1)
            text = text.replace(rf"\{{{name}\}}", f"(?P={name})")
    return text
