"""Children of the broker that make calls which may never end: asking them, and their answers."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from errno import EMFILE, ETIMEDOUT
from typing import Final, NamedTuple

from kata_pin.rights.broker.protocol import ANSWER, MAX_MESSAGE, REQUEST
from kata_pin.rights.broker.rows import BY_NAME, NUMBERS, Value

STARVED_S: Final = 2.0
"""Longest wait for an answer of a child that could run: it only gets no CPU."""

WINDOW: Final = 32
"""Most requests that a child has before it answered them."""

SlowFile = tuple[int, str]
"""A pid, and a file below /proc/<pid>."""


class Child(NamedTuple):
    """A child of the broker: its pid and our end of its socket.

    `jails` are those that the broker had verified when it began, by pid: it knows no others.
    """

    pid: int
    channel: socket.socket
    jails: Mapping[int, str]


async def read_all(
    child: Child,
    left: deque[tuple[int, str, int]],
    found: dict[SlowFile, bytes | OSError],
    deadline_s: float,
) -> bool:
    """Have a child read what is left until nothing is; return False when it did not answer."""
    sent: deque[tuple[int, str, int]] = deque()
    try:
        while left or sent:
            while left and len(sent) < WINDOW:
                pid, file, limit = left[0]
                values: dict[str, Value] = {"limit": limit, "pid": pid, "file": file}
                child.channel.send(request_of("slow-file", values))
                sent.append(left.popleft())
            try:
                _, errno, answer, handed = receive(child.channel)
            except BlockingIOError:
                await readable(child, deadline_s)
                continue
            pid, file, _ = sent.popleft()
            content = content_of(answer, handed)
            found[pid, file] = OSError(errno, os.strerror(errno)) if errno else content
    except (OSError, EOFError) as error:  # TimeoutError is an OSError
        if sent:
            pid, file, _ = sent.popleft()
            late = isinstance(error, TimeoutError)
            found[pid, file] = TimeoutError(ETIMEDOUT, "it hangs") if late else OSError(*error.args)
        left.extendleft(reversed(sent))
        return False
    return True


async def ask(child: Child, name: str, values: Mapping[str, Value], deadline_s: float) -> bytes:
    """Return a child's answer to one request.

    Raises OSError for the operation's own, TimeoutError or EOFError where none comes.
    """
    _send(child, name, values)
    await readable(child, deadline_s)
    return _answer(child)


def ask_now(child: Child, name: str, values: Mapping[str, Value], deadline_s: float) -> bytes:
    """Return what `ask` does; the event loop waits for it."""
    _send(child, name, values)
    until = time.monotonic() + deadline_s + STARVED_S
    answered = select.poll()
    answered.register(child.channel, select.POLLIN)
    while not answered.poll(deadline_s * 1000):
        if _sleeps(child) or time.monotonic() > until:
            raise TimeoutError(ETIMEDOUT, "it does not answer")
    return _answer(child)


def _send(child: Child, name: str, values: Mapping[str, Value]) -> None:
    try:
        child.channel.send(request_of(name, values))
    except (BrokenPipeError, ConnectionResetError) as error:
        raise EOFError("closed") from error


def _answer(child: Child) -> bytes:
    try:
        _, errno, answer, handed = receive(child.channel)
    except ConnectionResetError as error:
        raise EOFError("closed") from error
    content = content_of(answer, handed)
    if errno:
        raise OSError(errno, os.strerror(errno))
    return content


async def readable(child: Child, deadline_s: float) -> None:
    """Return when a child has answered; TimeoutError if it sleeps after the deadline, or long."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    until = time.monotonic() + deadline_s + STARVED_S
    loop.add_reader(child.channel.fileno(), ready.set)
    try:
        while not ready.is_set():
            try:
                async with asyncio.timeout(deadline_s):
                    await ready.wait()
            except TimeoutError:
                if _sleeps(child) or time.monotonic() > until:
                    raise
    finally:
        loop.remove_reader(child.channel.fileno())


def receive(channel: socket.socket) -> tuple[int, int, bytes, list[int]]:
    """Return an answer: the request's number, its errno, its bytes and descriptors.

    The errno is EMFILE if this process has no room for a descriptor: the kernel drops it then.
    Raises EOFError when the other end closed.
    """
    message, descriptors, flags, _ = socket.recv_fds(
        channel, MAX_MESSAGE, 4, flags=socket.MSG_CMSG_CLOEXEC
    )
    if len(message) < ANSWER.size:
        raise EOFError("closed")
    number, errno = ANSWER.unpack_from(message)
    if flags & socket.MSG_CTRUNC:
        for fd in descriptors:
            os.close(fd)
        errno, descriptors = EMFILE, []
    return number, errno, message[ANSWER.size :], descriptors


def _sleeps(child: Child) -> bool:
    """Return whether a child waits in a read: it does not if it could run, or was stopped.

    Nor does one that has answered by now: it sleeps until the next request.
    """
    try:
        with open(f"/proc/{child.pid}/stat", "rb", buffering=0) as file:
            if file.read(1024).rpartition(b") ")[2].startswith((b"R", b"T")):
                return False
    except OSError:
        return True
    answered = select.poll()
    answered.register(child.channel, select.POLLIN)
    return not answered.poll(0)


def content_of(answer: bytes, descriptors: Iterable[int]) -> bytes:
    """Return an answer's bytes, which may have come as a file in memory."""
    for fd in descriptors:
        with open(fd, "rb") as file:
            file.seek(0)
            answer += file.read()
    return answer


def request_of(name: str, values: Mapping[str, Value]) -> bytes:
    """Return a request to a child, whose answers come in the order of its requests."""
    return REQUEST.pack(NUMBERS[name], 0) + BY_NAME[name].pack(values)
