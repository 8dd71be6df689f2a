"""Calls that may never end: made by a child that the daemon has killed after a deadline."""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Callable, Sequence
from errno import EACCES
from typing import Any, Final, NamedTuple, NoReturn

from kata_pin.rights.broker import pages, threads
from kata_pin.rights.broker.files import connected, open_path
from kata_pin.rights.broker.libc import (
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    CAP_SYS_NICE,
    CAP_SYS_PTRACE,
    libc,
)
from kata_pin.rights.broker.living import executable_of, folder_of
from kata_pin.rights.broker.policy import VmmPolicy
from kata_pin.rights.broker.protocol import MAX_READ, Answer, answer_of, serve
from kata_pin.rights.broker.rows import ROWS, Row

MAX_MAPS: Final = 4 * 1024 * 1024
"""Most bytes of the two files that list mappings: a VMM may have 65,530 (vm.max_map_count)."""

_MAPS: Final = ("maps", "numa_maps")

Values = dict[str, Any]


class ChildKind(NamedTuple):
    """A kind of child: its capabilities, and what it does by the names of rows."""

    rights: Sequence[int]
    calls: dict[str, Callable[[Row, Values, VmmPolicy], Answer]]

    def begin(self, fd: int, policy: VmmPolicy) -> NoReturn:
        """Answer requests in this process, a fresh child, with these rights alone; then end it."""
        try:
            libc().keep_rights(self.rights)
            os.closerange(3, fd)
            os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
            with socket.socket(fileno=fd) as channel:
                serve(channel, lambda number, data, _: self.answer(number, data, policy))
        finally:
            os._exit(0)

    def answer(self, number: int, data: bytes, policy: VmmPolicy) -> Answer:
        """Answer a request of the daemon; raises OSError, ValueError or struct.error."""
        row = ROWS[number]
        call = self.calls.get(row.name)
        if call is None or not policy.settings.serves(row.feature):
            raise OSError(EACCES, "not a request to this child")
        return call(row, row.parse(data), policy)


def _slow_file(_: Row, values: Values, policy: VmmPolicy) -> Answer:
    pid, file, limit = values["pid"], values["file"], values["limit"]
    if file in _MAPS:
        policy.require(pid)
    return Answer(read(pid, file, min(limit, MAX_MAPS if file in _MAPS else MAX_READ)))


def _system_calls(_: Row, values: Values, policy: VmmPolicy) -> Answer:
    pid, tids = values["pid"], array("I", values["tids"])
    if len(tids) > threads.MAX_TIDS:
        raise ValueError("too many threads")
    policy.require(pid)
    return answer_of(threads.system_calls(f"/proc/{pid}", tids))


def _move_pages(_: Row, values: Values, policy: VmmPolicy) -> Answer:
    window = pages.parse_window(values["window"])
    policy.require(window.pid)
    return answer_of(pages.move_checked(window))


def _vcpu_list(row: Row, values: Values, policy: VmmPolicy) -> Answer:
    (base,) = policy.settings.bases(row.base)
    with connected(open_path(base, row.parts(values))) as end:
        greeting_s, session_s = values["greeting_ms"] / 1000, values["session_ms"] / 1000
        return Answer(threads.converse(end, greeting_s, session_s))


CHILDREN: Final = {
    # a thread's system call may be read by the file's owner only, and this is no process of root's
    "reader": ChildKind(
        (CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH),
        {"slow-file": _slow_file, "system-calls": _system_calls},
    ),
    "mover": ChildKind((CAP_SYS_PTRACE, CAP_SYS_NICE), {"move-pages": _move_pages}),
    "monitor": ChildKind((CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH), {"vcpu-list": _vcpu_list}),
}
"""The kinds of children."""


def read(pid: int, file: str, limit: int) -> bytes:
    """Return the content of a file below /proc/<pid>; of `exe` what it is. Raises OSError."""
    if file == "exe":
        link, target = executable_of(pid)
        found = os.stat(link)
        return b"%d %d %d %o\n%s" % (
            found.st_dev,
            found.st_ino,
            found.st_uid,
            found.st_mode,
            os.fsencode(target),
        )
    with open(f"{folder_of(pid)}/{file}", "rb", buffering=0) as content:
        return read_all(content.read, limit)


def read_all(read: Callable[[int], bytes | None], limit: int) -> bytes:
    """Return what comes until the end, at most `limit` bytes."""
    data = b""
    while len(data) < limit and (more := read(limit - len(data))):
        data += more
    return data
