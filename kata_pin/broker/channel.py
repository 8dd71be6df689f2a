"""Answering requests on a socket, one after another."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Sequence
from errno import EINVAL
from typing import Final, NamedTuple

from kata_pin.broker.protocol import ANSWER, MAX_INLINE, MAX_MESSAGE, REQUEST

MOST_DESCRIPTORS: Final = 4


class Answer(NamedTuple):
    """What an operation returns: bytes, and descriptors that are handed over and then closed."""

    data: bytes = b""
    descriptors: tuple[int, ...] = ()


Run = Callable[[bytes, bytes, Sequence[int]], Answer]


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
            letter, number = REQUEST.unpack_from(request)
            answer = run(letter, request[REQUEST.size :], descriptors)
            errno = 0
        except OSError as error:
            errno = error.errno or EINVAL
        except (ValueError, IndexError, OverflowError, struct.error):
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
        socket.send_fds(channel, [ANSWER.pack(number, errno) + data], descriptors)
    except OSError:  # the daemon has ended: the next look at the channel shows it
        pass
    finally:
        for fd in descriptors:
            os.close(fd)
