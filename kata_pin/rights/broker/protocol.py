"""What the daemon and its broker send each other (docs/broker.md).

The first message has settings; then come records, which the broker answers one after another.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from errno import EINVAL
from functools import lru_cache
from typing import Any, Final, NamedTuple

MAX_MESSAGE: Final = 64 * 1024
MAX_INLINE: Final = MAX_MESSAGE - 64
"""Longest answer that is sent as such; a longer one comes as memory (memfd_create(2))."""

MAX_READ: Final = 128 * 1024
MAX_CHANGES: Final = 512
MAX_NAMES: Final = 16_384  # names of a folder
MAX_MASK: Final = 1024  # bytes: 8,192 CPUs
MAX_NUMBER: Final = 10_000  # above those of CPUs and nodes that the table lets through
MAX_KEPT: Final = 4096  # masks that are remembered

REQUEST: Final = struct.Struct("=BI")  # number of the row (rows.py), number of the request
ANSWER: Final = struct.Struct("=Ii")  # number of the request, errno
NUMBER: Final = struct.Struct("=I")
STATUS: Final = struct.Struct("=QQIIIqq")  # a FileStatus

_CHANGES: Final = struct.Struct("=HH")  # how many sets, how many changes
_CHANGE: Final = struct.Struct("=iiQQH")  # tgid, tid, start time, inode, number of the set
_ERRNO: Final = struct.Struct("=i")
_LENGTH: Final = struct.Struct("=H")


class AffinityChange(NamedTuple):
    """An affinity to set.

    `starttime` and `inode` identify the thread: when it started, in clock ticks since boot, and the
    inode of its folder in /proc, 0 where that is not known.
    """

    tgid: int
    tid: int
    starttime: int
    inode: int
    cpus: frozenset[int]


class Changed(NamedTuple):
    """What became of a change: `errno` of the call, and the affinity that the thread then had.

    ESRCH: the thread is gone. ESTALE: its tid belongs to another thread. EACCES: the process is
    none that may be changed.
    """

    errno: int
    after: frozenset[int] = frozenset()


class FileStatus(NamedTuple):
    """What is used of stat(2)."""

    device: int
    inode: int
    mode: int
    uid: int
    links: int
    size: int
    modified_ns: int


def parse_changes(data: bytes) -> list[AffinityChange]:
    """Return the changes of a request; raises ValueError or struct.error."""
    masks, count = _CHANGES.unpack_from(data)
    at = _CHANGES.size
    sets: list[frozenset[int]] = []
    for _ in range(masks):
        mask, at = _mask(data, at)
        sets.append(mask)
    if count > MAX_CHANGES or len(data) != at + count * _CHANGE.size:
        raise ValueError("not as long as it says")
    changes = []
    for tgid, tid, starttime, inode, number in _CHANGE.iter_unpack(data[at:]):
        if tgid <= 0 or tid <= 0 or number >= len(sets):
            raise ValueError("no such thread or set")
        changes.append(AffinityChange(tgid, tid, starttime, inode, sets[number]))
    return changes


def render_changes(changes: Sequence[AffinityChange]) -> bytes:
    """Return the request for changes, at most MAX_CHANGES."""
    numbers: dict[frozenset[int], int] = {}
    rows = [
        _CHANGE.pack(one.tgid, one.tid, one.starttime, one.inode, number)
        for one in changes
        for number in [numbers.setdefault(one.cpus, len(numbers))]
    ]
    masks = [_LENGTH.pack(len(mask)) + mask for mask in map(mask_of, numbers)]
    return b"".join((_CHANGES.pack(len(masks), len(rows)), *masks, *rows))


def parse_changed(data: bytes) -> list[Changed]:
    """Return the answer to a request for changes."""
    at = 0
    done: list[Changed] = []
    while at < len(data):
        (errno,) = _ERRNO.unpack_from(data, at)
        mask, at = _mask(data, at + _ERRNO.size)
        done.append(Changed(errno, mask))
    return done


def render_changed(done: Iterable[Changed]) -> bytes:
    """Return the answer to a request for changes."""
    rows = ((_ERRNO.pack(one.errno), mask_of(one.after)) for one in done)
    return b"".join(errno + _LENGTH.pack(len(mask)) + mask for errno, mask in rows)


@lru_cache(MAX_KEPT)
def mask_of(cpus: frozenset[int]) -> bytes:
    """Return a set as the kernel's bits, little-endian; a node has few distinct ones."""
    bits = sum(1 << cpu for cpu in cpus)
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


@lru_cache(MAX_KEPT)
def _cpus(mask: bytes) -> frozenset[int]:
    bits = int.from_bytes(mask, "little")
    return frozenset(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)


def numbers_in(text: str) -> set[int]:
    """Return the numbers of a list such as `0-1,4`, below MAX_NUMBER; ValueError for no list."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        found |= set(range(int(first), min(int(last if dash else first) + 1, MAX_NUMBER)))
    return found


def _mask(data: bytes, at: int) -> tuple[frozenset[int], int]:
    """Return a set, and where the next thing begins."""
    (length,) = _LENGTH.unpack_from(data, at)
    start, end = at + _LENGTH.size, at + _LENGTH.size + length
    if length > MAX_MASK or end > len(data):
        raise ValueError("no such set")
    return _cpus(data[start:end]), end


# Answering requests on a socket, one after another.

MOST_DESCRIPTORS: Final = 4


class Answer(NamedTuple):
    """What an operation returns: bytes, and descriptors that are handed over and then closed."""

    data: bytes = b""
    descriptors: tuple[int, ...] = ()


def answer_of(value: object) -> Answer:
    """Return the answer that is a value, as JSON."""
    return Answer(json.dumps(value).encode())


Run = Callable[[int, bytes, Sequence[int]], Answer]


def serve(channel: socket.socket, run: Run) -> None:
    """Answer requests until the other end closes. One that makes no sense is answered EINVAL."""
    while True:
        try:
            request, descriptors, _, _ = socket.recv_fds(
                channel, MAX_MESSAGE, MOST_DESCRIPTORS, flags=socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return
        if not request:
            return
        number, answer, errno = 0, Answer(), EINVAL
        try:
            row, number = REQUEST.unpack_from(request)
            answer = run(row, request[REQUEST.size :], descriptors)
            errno = 0
        except OSError as error:
            errno = error.errno or EINVAL
        except (ValueError, IndexError, KeyError, OverflowError, struct.error):
            pass
        finally:
            for fd in descriptors:
                os.close(fd)
        _send(channel, number, errno, answer)


def _send(channel: socket.socket, number: int, errno: int, answer: Answer) -> None:
    """Send an answer, a long one as a descriptor; close its descriptors."""
    data, descriptors = answer
    try:
        if len(data) > MAX_INLINE:
            memory = os.memfd_create("answer")
            descriptors = (memory,)
            with open(memory, "wb", closefd=False) as file:
                file.write(data)
            data = b""
        message = ANSWER.pack(number, errno) + data
        if descriptors:
            socket.send_fds(channel, [message], descriptors)
        else:
            channel.send(message)
    except OSError:  # the daemon has ended: the next look at the channel shows it
        pass
    finally:
        for fd in descriptors:
            os.close(fd)


# What the daemon's first message says: where things are on this node, and what is switched on.


class Settings(NamedTuple):
    """The broker's settings. A program is a path whose last part may be a pattern (fnmatch)."""

    vmms: Sequence[str] = ()
    shims: Sequence[str] = ()
    vc: str = ""
    kata: str = ""
    cdi: str = ""
    debugfs: str = ""
    kubelet_state: str = ""
    bundle_roots: Sequence[str] = ()
    nri: str = ""
    cri: str = ""
    pods: str = ""
    qmp: bool = False
    thread_events: bool = False
    rt: Sequence[str] = ()
    """Patterns (re) of the names of threads that may become real-time ones: vCPUs."""
    quiet: str = ""
    """The level whose tunables are written: `irq` or `full`, empty for none."""
    resctrl: bool = False
    memory: bool = False
    classes: Sequence[tuple[str, str]] = ()
    """Classes of resctrl, each with its schemata."""

    def bases(self, name: str) -> Sequence[str]:
        """Return what a row's base stands for: one path, or each of the bundle roots."""
        if name == "root":
            return [os.path.realpath(root) for root in self.bundle_roots]
        if name == "kubelet":
            return [os.path.dirname(self.kubelet_state)]
        path: str = getattr(self, name)
        return [os.path.normpath(path)] if path else []

    @property
    def checkpoint(self) -> str:
        """The name of the kubelet's checkpoint in its folder."""
        return os.path.basename(self.kubelet_state)

    def serves(self, feature: str) -> bool:
        """Whether rows of a feature are served; those without one always are."""
        return not feature or bool(getattr(self, feature))

    def pack(self) -> bytes:
        """Return the first message."""
        return json.dumps(self._asdict()).encode()


def parse_settings(data: bytes) -> Settings:
    """Return what the first message says; ValueError or TypeError for another message."""
    values: dict[str, Any] = json.loads(data)
    return Settings(**values)
