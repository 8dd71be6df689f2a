"""Reads that may never end: made by a child that the daemon has killed after a deadline."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from errno import EACCES
from typing import Final

from kata_pin.broker.channel import Answer, serve
from kata_pin.broker.libc import CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE, libc
from kata_pin.broker.policy import Policy
from kata_pin.broker.protocol import MAX_READ, NUMBER

_OF_ANYBODY: Final = ("cmdline", "exe")
_FILE: Final = re.compile(r"([1-9][0-9]{0,9})/(exe|cmdline|task/[1-9][0-9]{0,9}/syscall)\Z")


def be_reader(fd: int, policy: Policy) -> None:
    """Answer reads in this process, a fresh child, until the daemon's end closes; never return."""
    try:
        # `syscall` may be read by the file's owner only, and this is no process of root's
        libc().keep_rights([CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH])
        os.closerange(3, fd)
        os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
        with socket.socket(fileno=fd) as channel:
            serve(channel, lambda letter, data, _: answer(letter, data, policy))
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
    return Answer(read(pid, file, min(limit, MAX_READ)))


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
