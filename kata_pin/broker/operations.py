"""What the broker does for the daemon: one method per operation of docs/broker.md."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import EACCES, EMFILE, ESRCH
from functools import partial
from select import poll
from typing import Final

from kata_pin.broker.affinity import set_affinities
from kata_pin.broker.channel import Answer
from kata_pin.broker.connector import process_events
from kata_pin.broker.libc import AT_EMPTY_PATH, libc, status_of
from kata_pin.broker.perf import open_switches
from kata_pin.broker.policy import Policy, field
from kata_pin.broker.protocol import (
    MAX_READ,
    NUMBER,
    STATUS,
    Change,
    Changed,
    parse_changes,
    parse_group,
    render_changed,
)
from kata_pin.broker.resctrl import Resctrl
from kata_pin.broker.scheduling import set_classes
from kata_pin.broker.slow_reads import be_mover, be_reader
from kata_pin.broker.tunables import (
    ask_irqbalance,
    parse_writes,
    render_written,
    write_tunables,
)

MAX_READERS: Final = 64
"""Most children at once; of those that were killed, some may be stuck in the kernel for good."""

_GONE: Final = (FileNotFoundError, ProcessLookupError)

_LINK: Final = re.compile(r"/proc/([1-9][0-9]{0,9})/(exe|fd/[0-9]{1,10})\Z")
_DESCRIPTORS: Final = re.compile(r"/proc/([1-9][0-9]{0,9})/fd\Z")
_IN_DONT_FOLLOW: Final = 0x02000000
_IRQBALANCE: Final = (b"?", b"=")
_CHILDREN: Final = {b"": be_reader, b"m": be_mover}


class Operations:
    """What the daemon may ask for, by letter; each takes the request's bytes and descriptors."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._resctrl = Resctrl(policy.classes)
        self._readers: dict[int, int] = {}
        """The pidfds of children, by pid."""
        self._by_letter = {
            b"a": self._affinities,
            b"l": self._readlink,
            b"d": self._listdir,
            b"s": self._stat,
            b"r": self._read,
            b"o": self._open,
            b"c": self._connect,
            b"j": self._verify_jail,
            b"w": self._watch,
            b"p": self._process_events,
            b"e": self._switches,
            b"n": self._new_reader,
            b"k": self._kill_reader,
            b"S": self._scheduling,
            b"G": self._make_group,
            b"J": self._join_group,
            b"R": self._remove_group,
            b"t": self._tunables,
            b"b": self._irqbalance,
        }

    def run(self, letter: bytes, data: bytes, descriptors: Sequence[int]) -> Answer:
        """Run an operation; raises OSError, and ValueError for a request without sense."""
        operation = self._by_letter.get(letter)
        if operation is None:
            raise ValueError("no such operation")
        return operation(data, descriptors)

    def end(self) -> None:
        """Kill the children."""
        for number in list(self._readers):
            self._kill_reader(NUMBER.pack(number), ())

    def _affinities(self, data: bytes, _: Sequence[int]) -> Answer:
        return self._changed(parse_changes(data), set_affinities, ours=True)

    def _changed(
        self,
        changes: Sequence[Change],
        change: Callable[[Sequence[Change]], list[Changed]],
        *,
        ours: bool = False,
    ) -> Answer:
        """Change those threads that may be touched, our own too with `ours`."""
        refused = {
            tgid: 0 if ours and _is_ours(tgid) else self._refusal(tgid)
            for tgid in {one.tgid for one in changes}
        }
        done = iter(change([one for one in changes if not refused[one.tgid]]))
        return Answer(
            render_changed(
                Changed(refused[one.tgid]) if refused[one.tgid] else next(done) for one in changes
            )
        )

    def _scheduling(self, data: bytes, _: Sequence[int]) -> Answer:
        (policy,), (priority,) = NUMBER.unpack_from(data), NUMBER.unpack_from(data, NUMBER.size)
        give = partial(set_classes, policy=policy, priority=priority)
        return self._changed(parse_changes(data[2 * NUMBER.size :]), give)

    def _make_group(self, data: bytes, _: Sequence[int]) -> Answer:
        group = parse_group(data)
        self._resctrl.make(group.class_name, group.name)
        return Answer()

    def _join_group(self, data: bytes, _: Sequence[int]) -> Answer:
        group = parse_group(data)
        join = partial(self._resctrl.join, group.class_name, group.name)
        return self._changed(group.threads, join)

    def _remove_group(self, data: bytes, _: Sequence[int]) -> Answer:
        group = parse_group(data)
        self._resctrl.remove(group.class_name, group.name)
        return Answer()

    def _refusal(self, tgid: int) -> int:
        """Return why threads of a process are not touched: an errno, 0 if they may be.

        One that is not there is never tried: its number may be the next that is given out.
        """
        try:
            return 0 if self._policy.may_change(tgid) else EACCES
        except _GONE:
            return ESRCH
        except (OSError, ValueError, IndexError):
            return EACCES

    def _require(self, pid: str) -> None:
        refusal = self._refusal(int(pid))
        if refusal:
            raise OSError(refusal, "not a process of a sandbox")

    def _readlink(self, data: bytes, _: Sequence[int]) -> Answer:
        path = _path(data)
        match = _LINK.match(path)
        if match is None:
            raise OSError(EACCES, "not a link that may be read")
        if match[2] != "exe":
            self._require(match[1])
        return Answer(os.readlink(os.fsencode(path)))

    def _listdir(self, data: bytes, _: Sequence[int]) -> Answer:
        path = _path(data)
        match = _DESCRIPTORS.match(path)
        if match is not None:
            self._require(match[1])
            return Answer(os.fsencode("/".join(os.listdir(path))))
        fd = self._policy.open_below(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return Answer(os.fsencode("/".join(os.listdir(fd))))
        finally:
            os.close(fd)

    def _stat(self, data: bytes, _: Sequence[int]) -> Answer:
        path = _path(data)
        match = _LINK.match(path)
        if (match is not None and match[2] == "exe") or self._policy.is_named(path):
            return Answer(STATUS.pack(*status_of(path)))
        fd = self._policy.open_below(path, os.O_PATH)
        try:
            return Answer(STATUS.pack(*libc().statx(fd, "", AT_EMPTY_PATH)))
        finally:
            os.close(fd)

    def _read(self, data: bytes, _: Sequence[int]) -> Answer:
        limit, path = _number(data)
        fd = self._policy.open_file(path)
        try:
            return Answer(os.read(fd, min(limit, MAX_READ)))
        finally:
            os.close(fd)

    def _open(self, data: bytes, _: Sequence[int]) -> Answer:
        return Answer(b"", (self._policy.open_file(_path(data)),))

    def _connect(self, data: bytes, _: Sequence[int]) -> Answer:
        path, fd = _path(data), -1
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        with socket.socket(socket.AF_UNIX, kind) as end:
            try:
                if path not in self._policy.sockets:
                    fd = self._policy.open_socket(path)
                    path = f"/proc/self/fd/{fd}"
                end.connect(path)
            finally:
                if fd >= 0:
                    os.close(fd)
            return Answer(b"", (end.detach(),))

    def _verify_jail(self, data: bytes, _: Sequence[int]) -> Answer:
        self._policy.verify_jail(*_number(data))
        return Answer()

    def _watch(self, data: bytes, descriptors: Sequence[int]) -> Answer:
        mask, path = _number(data)
        if len(descriptors) != 1:
            raise ValueError("needs a descriptor of inotify")
        fd = self._policy.open_to_watch(path)
        try:
            mask &= ~_IN_DONT_FOLLOW  # `fd` is no link, only its name below is one
            watch = libc().add_watch(descriptors[0], f"/proc/self/fd/{fd}", mask)
            return Answer(NUMBER.pack(watch))
        finally:
            os.close(fd)

    def _process_events(self, data: bytes, _: Sequence[int]) -> Answer:
        return Answer(b"", (process_events(data).detach(),))

    def _switches(self, data: bytes, _: Sequence[int]) -> Answer:
        (cpu,) = NUMBER.unpack(data)
        return Answer(b"", (open_switches(cpu),))

    def _new_reader(self, data: bytes, __: Sequence[int]) -> Answer:
        be_child = _CHILDREN.get(data)
        if be_child is None:
            raise ValueError("no such child")
        self._readers = {pid: fd for pid, fd in self._readers.items() if not _has_ended(fd)}
        if len(self._readers) >= MAX_READERS:
            raise OSError(EMFILE, "too many readers are stuck")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            pid = os.fork()
            if not pid:
                be_child(ours.fileno(), self._policy)
            theirs_fd = theirs.detach()
            self._readers[pid] = os.pidfd_open(pid)
        return Answer(NUMBER.pack(pid), (theirs_fd,))

    def _kill_reader(self, data: bytes, _: Sequence[int]) -> Answer:
        (pid,) = NUMBER.unpack(data)
        fd = self._readers.get(pid)
        if fd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        return Answer()

    def _tunables(self, data: bytes, _: Sequence[int]) -> Answer:
        return Answer(render_written(write_tunables(parse_writes(data))))

    def _irqbalance(self, data: bytes, _: Sequence[int]) -> Answer:
        (pid,) = NUMBER.unpack_from(data)
        what, banned = data[NUMBER.size : NUMBER.size + 1], data[NUMBER.size + 1 :]
        if what not in _IRQBALANCE or (what == b"?" and banned):
            raise ValueError("no such request")
        end = ask_irqbalance(pid, None if what == b"?" else banned.decode("ascii"))
        return Answer(b"", (end.detach(),))


def _path(data: bytes) -> str:
    if not data.startswith(b"/") or b"\0" in data:
        raise ValueError("no path")
    return os.fsdecode(data)


def _number(data: bytes) -> tuple[int, str]:
    """Return the number and the path of a request."""
    (number,) = NUMBER.unpack_from(data)
    return int(number), _path(data[NUMBER.size :])


def _is_ours(tgid: int) -> bool:
    """Whether a process is this one, or a child of it that reads."""
    with suppress(OSError, IndexError, ValueError):
        return os.getpid() in {tgid, int(field(tgid, b"PPid")[0])}
    return False


def _has_ended(pidfd: int) -> bool:
    """Whether a child has ended; then its descriptor is closed."""
    waiting = poll()
    waiting.register(pidfd)
    if not waiting.poll(0):
        return False
    os.close(pidfd)
    return True
