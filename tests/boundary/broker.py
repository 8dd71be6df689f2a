"""The broker as a process, and nothing of it but its socket: bytes in, bytes and descriptors out.

    with broker(vc="/run/vc", vmms=["/usr/bin/qemu*"]) as ask:
        assert ask("sandbox-state-go", 1024, "p1").errno == 0

The number and the arguments of a row are those of the table in docs/broker.md. `mounts` puts
folders of the test in the place of the kernel's and irqbalance's, for the broker alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs/broker.md"
PROGRAM: Final = ROOT / "kata_pin/rights/broker/__main__.py"

LONGEST: Final = 64 * 1024  # a message
OFF: Final[Mapping[str, object]] = {
    **dict.fromkeys(("vc", "kata", "cdi", "debugfs", "kubelet_state"), ""),
    **dict.fromkeys(("nri", "cri", "pods", "quiet"), ""),
    **{name: [] for name in ("vmms", "shims", "bundle_roots", "classes", "rt")},
    **dict.fromkeys(("qmp", "thread_events", "resctrl", "memory"), False),
}
"""The first message of a daemon that needs nothing."""

_ANSWER_S: Final = 20.0
_BINARY: Final = frozenset({"changes", "writes", "pids", "tids", "window"})
_STATUS: Final = struct.Struct("=QQIIIqq")
_CHANGE: Final = struct.Struct("=iiQQH")


class Row(NamedTuple):
    """A row of the page: its number on the wire, and the names of its arguments."""

    number: int
    arguments: tuple[str, ...]


@cache
def rows() -> dict[str, Row]:
    """Return the rows of the page by name."""
    table = PAGE.read_text().partition("## The rows")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `([a-z-]+)` \| (.*?) \|", table, re.MULTILINE)
    return {
        name: Row(number, tuple(re.findall(r"`([a-z_]+)`", arguments)))
        for number, (name, arguments) in enumerate(lines)
    }


class Status(NamedTuple):
    """What a row of files says of a file."""

    device: int
    inode: int
    mode: int
    uid: int
    links: int
    size: int
    modified_ns: int


class Thread(NamedTuple):
    """A thread as requests name it; an inode of 0 has it identified by its start alone."""

    tgid: int
    tid: int
    starttime: int
    inode: int = 0


class Reply(NamedTuple):
    """An answer; the caller closes the descriptors."""

    errno: int
    data: bytes
    descriptors: tuple[int, ...]

    @property
    def status(self) -> Status:
        """What the answer of a file begins with."""
        return Status(*_STATUS.unpack_from(self.data))

    @property
    def content(self) -> bytes:
        """What follows it."""
        return self.data[_STATUS.size :]

    @property
    def value(self) -> Any:
        """An answer that is JSON."""
        return json.loads(self.data)

    @property
    def changed(self) -> list[tuple[int, set[int]]]:
        """The errno of each thread, and the CPUs that it then has."""
        found, at = [], 0
        while at < len(self.data):
            errno, length = struct.unpack_from("=iH", self.data, at)
            mask = int.from_bytes(self.data[at + 6 : at + 6 + length], "little")
            found.append((errno, {cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1}))
            at += 6 + length
        return found

    @property
    def written(self) -> list[tuple[int, str]]:
        """The errno of each write, and the value that was then read."""
        return [(errno, value) for errno, value in self.value]


@dataclass
class Channel:
    """The daemon's end of the socket to a broker, or to a child of it (then `pid` is its)."""

    end: socket.socket
    pid: int
    asked: int = 0

    def __call__(self, name: str, *arguments: int | str | bytes, fds: Sequence[int] = ()) -> Reply:
        """Ask for a row."""
        row = rows()[name]
        assert len(arguments) == len(row.arguments), f"{name}: {row.arguments}"
        return self.request(row.number, packed(*arguments), fds)

    def request(self, row: int, data: bytes, fds: Sequence[int] = ()) -> Reply:
        """Send arguments as they are, and return the answer to just this request."""
        self.asked += 1
        number, reply = self.message(struct.pack("=BI", row, self.asked) + data, fds)
        assert number == self.asked
        return reply

    def message(self, data: bytes, fds: Sequence[int] = ()) -> tuple[int, Reply]:
        """Send a whole message; return the number of the request that is answered."""
        if fds:
            socket.send_fds(self.end, [data], fds)
        else:
            self.end.send(data)
        answer, descriptors, _, _ = socket.recv_fds(self.end, LONGEST, 8)
        number, errno = struct.unpack_from("=Ii", answer)
        data = answer[8:]
        if not data and len(descriptors) == 1 and _is_memory(descriptors[0]):
            with open(descriptors.pop(), "rb") as file:
                file.seek(0)
                data = file.read()
        return number, Reply(errno, data, tuple(descriptors))

    def handed(self, name: str, *arguments: int | str | bytes) -> int:
        """Return the descriptor that a row hands over."""
        reply = self(name, *arguments)
        assert reply.errno == 0, f"{name}: {os.strerror(reply.errno)}"
        (fd,) = reply.descriptors
        return fd

    def refusals(self, name: str, *arguments: int | str | bytes) -> int:
        """Return the errno of a row that hands nothing over."""
        reply = self(name, *arguments)
        assert not reply.descriptors
        return reply.errno

    @contextlib.contextmanager
    def child(self, kind: str) -> Iterator[Channel]:
        """Start a child; it ends with the block."""
        reply = self("child", kind)
        assert reply.errno == 0, os.strerror(reply.errno)
        (pid,) = struct.unpack("=I", reply.data)
        with socket.socket(fileno=reply.descriptors[0]) as end:
            end.settimeout(_ANSWER_S)
            yield Channel(end, pid)

    def children(self) -> list[int]:
        """Return the pids of the broker's children."""
        text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in text.split()]


def packed(*arguments: int | str | bytes) -> bytes:
    """Return arguments as they travel: numbers, texts with their length, bytes as they are."""
    parts = []
    for value in arguments:
        if isinstance(value, int):
            parts.append(struct.pack("=I", value))
        elif isinstance(value, str):
            parts.append(struct.pack("=H", len(value)) + value.encode("latin-1"))
        else:
            parts.append(value)
    return b"".join(parts)


def is_binary(argument: str) -> bool:
    """Whether an argument of the page is bytes without a length, the last of its row."""
    return argument in _BINARY


def changes(threads: Sequence[Thread], *cpus: set[int]) -> bytes:
    """Return a request for threads: each has the set of its place in `cpus`, the last the rest."""
    cpus = cpus or (set(),)
    masks = [sum(1 << cpu for cpu in one).to_bytes(1024, "little").rstrip(b"\0") for one in cpus]
    sets = b"".join(struct.pack("=H", len(mask)) + mask for mask in masks)
    rows = (
        _CHANGE.pack(*thread, min(place, len(cpus) - 1)) for place, thread in enumerate(threads)
    )
    return struct.pack("=HH", len(cpus), len(threads)) + sets + b"".join(rows)


def thread_of(tgid: int, tid: int, *, inode: bool = False) -> Thread:
    """Return a living thread."""
    stat = Path(f"/proc/{tgid}/task/{tid}/stat").read_bytes()
    start = int(stat.rpartition(b")")[2].split()[19])
    number = os.stat(f"/proc/{tgid}/task/{tid}").st_ino if inode else 0
    return Thread(tgid, tid, start, number)


@contextlib.contextmanager
def started(
    first: bytes, mounts: Mapping[str, Path] | None = None, user: int | None = None
) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """Start a broker with a first message; yield the daemon's end. It ends with the block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-IS", str(PROGRAM), str(theirs.fileno())]
    if mounts:
        binds = [f"mount --bind {shlex.quote(str(path))} {at}" for at, path in mounts.items()]
        script = " && ".join((*binds, f"exec {shlex.join(command)}"))
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    with ours:
        with theirs:
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE, cwd="/", user=user,
            )  # fmt: skip
        ours.settimeout(_ANSWER_S)
        with process:
            try:
                ours.send(first)
                yield ours, process
            finally:
                ours.close()
                try:
                    process.wait(_ANSWER_S)
                finally:
                    process.kill()


@contextlib.contextmanager
def broker(mounts: Mapping[str, Path] | None = None, **settings: Any) -> Iterator[Channel]:
    """Run a broker whose first message has these settings, and all else off."""
    assert settings.keys() <= OFF.keys()
    with started(json.dumps({**OFF, **settings}).encode(), mounts) as (end, process):
        assert end.recv(LONGEST) == struct.pack("=Ii", 0, 0), "it serves"
        yield Channel(end, process.pid)


def _is_memory(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
