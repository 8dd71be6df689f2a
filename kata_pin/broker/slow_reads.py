"""Calls that may never end: made by a child that the daemon has killed after a deadline."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from errno import EACCES
from functools import partial
from typing import Final

from kata_pin.broker import pages
from kata_pin.broker.channel import Answer, serve
from kata_pin.broker.libc import CAP_DAC_READ_SEARCH, CAP_SYS_NICE, CAP_SYS_PTRACE, libc
from kata_pin.broker.policy import Policy
from kata_pin.broker.protocol import MAX_READ, NUMBER

MAX_MAPS: Final = 4 * 1024 * 1024
"""Most bytes of the two files that list mappings: a VMM may have 65,530 (vm.max_map_count)."""

_OF_ANYBODY: Final = ("cmdline", "exe")
_MAPS: Final = ("maps", "numa_maps")
_FILE: Final = re.compile(
    r"([1-9][0-9]{0,9})/(exe|cmdline|maps|numa_maps|task/[1-9][0-9]{0,9}/syscall)\Z"
)


def be_reader(fd: int, policy: Policy) -> None:
    """Answer reads in this process, a fresh child, until the daemon's end closes; never return."""
    # `syscall` may be read by the file's owner only, and this is no process of root's
    be_child(fd, (CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH), partial(answer, policy=policy))


def be_mover(fd: int, policy: Policy) -> None:
    """Move pages in this process, a fresh child, as be_reader."""
    be_child(fd, (CAP_SYS_PTRACE, CAP_SYS_NICE), partial(pages.answer, policy=policy))


def be_child(fd: int, rights: Sequence[int], run: Callable[[bytes, bytes], Answer]) -> None:
    """Answer requests in this process with these rights alone, then end it."""
    try:
        libc().keep_rights(rights)
        os.closerange(3, fd)
        os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
        with socket.socket(fileno=fd) as channel:
            serve(channel, lambda letter, data, _: run(letter, data))
    finally:
        os._exit(0)


def answer(letter: bytes, data: bytes, policy: Policy) -> Answer:
    """Answer a request of the daemon; raises OSError, ValueError or struct.error."""
    (limit,) = NUMBER.unpack_from(data)
    match = _FILE.match(os.fsdecode(data[NUMBER.size :]))
    if letter != b"x" or match is None:
        raise OSError(EACCES, "not a file that may be read")
    pid, file = int(match[1]), match[2]
    if file not in _OF_ANYBODY and not policy.may_change(pid):
        raise OSError(EACCES, "not a process of a sandbox")
    return Answer(read(pid, file, min(limit, MAX_MAPS if file in _MAPS else MAX_READ)))


def read(pid: int, file: str, limit: int) -> bytes:
    """Return the content of a file below /proc/<pid>; of `exe` what it is. Raises OSError."""
    path = f"/proc/{pid}/{file}"
    if file == "exe":
        found, target = os.stat(path), os.readlink(os.fsencode(path))
        return b"%d %d %d %o\n%s" % (
            found.st_dev,
            found.st_ino,
            found.st_uid,
            found.st_mode,
            target,
        )
    with open(path, "rb", buffering=0) as content:
        return read_all(content.read, limit)


def read_all(read: Callable[[int], bytes | None], limit: int) -> bytes:
    """Return what comes until the end, at most `limit` bytes."""
    data = b""
    while len(data) < limit and (more := read(limit - len(data))):
        data += more
    return data
