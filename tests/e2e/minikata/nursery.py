"""A warm interpreter for tests with many sandboxes: runs minikata's commands in forks of itself.

    containerd-shim-kata-v2 -IS nursery.py SOCKET

An interpreter's start takes 50 times longer in a lab machine than a fork. Each connection brings
one command line, words with NUL between them; the answer is the exit status and what was printed.
The services are such forks too: each gets the command line that Kata's shim would have, for shims
are known by it, and lives as long as its sandbox. It serves until its socket is removed.
Out of scope: what the commands do (client.py, service.py).
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

sys.path.insert(0, os.path.realpath(f"{os.path.dirname(__file__)}/../../.."))

from tests.e2e.minikata import client, service

PR_SET_MM = 35  # prctl(2)
PR_SET_MM_ARG_START = 8
PR_SET_MM_ARG_END = 9


def main(path: str) -> None:
    """Serve; every command is a fork of a fork, so that nobody has to wait for it."""
    client.become = _become_service
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    while os.path.exists(path):
        connection, _ = listener.accept()
        with connection:
            child = os.fork()
            if child == 0:
                if os.fork() == 0:
                    listener.close()
                    _run(connection)
                os._exit(0)
            os.waitpid(child, 0)


def _run(connection: socket.socket) -> None:
    """Run one command with the connection as its output, and end."""
    status = 70
    try:
        words = b"".join(iter(lambda: connection.recv(65536), b"")).decode().split("\0")
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)
        status = client.main(words)
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        os.set_blocking(reader, False)
        connection.sendall(f"{status}\0".encode() + _available(reader))
    finally:
        os._exit(status)


def _available(reader: int) -> bytes:
    """Return what was printed so far: the container's own process has the pipe too."""
    try:
        return os.read(reader, 65536)
    except BlockingIOError:
        return b""


def _become_service(executable: str, argv: list[str]) -> None:
    """Run the service here, under the command line that the new program would have had."""
    del executable
    text = ctypes.create_string_buffer("\0".join(argv).encode())
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.addressof(text)
    for what, address in (
        (PR_SET_MM_ARG_START, start),
        (PR_SET_MM_ARG_END, start + len(text)),
    ):
        if libc.prctl(PR_SET_MM, what, ctypes.c_ulong(address), 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
    service.main(argv)


if __name__ == "__main__":
    main(sys.argv[1])
