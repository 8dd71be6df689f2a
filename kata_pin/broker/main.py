"""The program of the broker: the daemon's helper, and the only process that keeps rights (D23).

It sets affinities, and reads and opens what an unprivileged daemon may not. It decides nothing and
parses nothing that a pod, a guest, QEMU or Kata wrote: it looks at what the kernel shows of a
process, and hands on bytes and descriptors as they are. Whatever the daemon asks, it touches only

- threads of processes that it verified itself (policy.py), and kernel threads that work for one;
- files, folders and sockets below the folders that its first message names, without following a
  link below them.

The first message comes from the daemon while that is still root; nothing later widens what it
allows. The broker ends when the daemon's end of the socket does. docs/broker.md has the protocol.
It uses the standard library only.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Final

from kata_pin.broker.channel import serve
from kata_pin.broker.libc import (
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    CAP_NET_ADMIN,
    CAP_PERFMON,
    CAP_SETUID,
    CAP_SYS_NICE,
    CAP_SYS_PTRACE,
    libc,
)
from kata_pin.broker.operations import Operations
from kata_pin.broker.policy import Policy
from kata_pin.broker.protocol import ANSWER, MAX_MESSAGE

NAME: Final = "kata-pin-broker"

_RIGHTS: Final = (*(CAP_DAC_READ_SEARCH, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_NICE, CAP_SYS_PTRACE),)
_RIGHTS_OF_OTHERS: Final = (*_RIGHTS, CAP_DAC_OVERRIDE, CAP_SETUID)
"""Root may connect to root's sockets, and irqbalance takes it for root."""


def main(number: int) -> None:
    """Take the first message from the socket of that number, then serve until the daemon ends."""
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(ignored, signal.SIG_IGN)  # it ends with the daemon; children are not awaited
    libc().set_name(NAME)
    libc().keep_rights(_RIGHTS_OF_OTHERS if os.geteuid() else _RIGHTS)
    libc().hide()
    with socket.socket(fileno=number) as channel:
        setup = channel.recv(MAX_MESSAGE)
        if not setup:
            return
        operations = Operations(Policy(setup))
        try:
            channel.send(ANSWER.pack(0, 0))
            serve(channel, operations.run)
        except (BrokenPipeError, ConnectionResetError):
            return  # the daemon was killed while it started
        finally:
            operations.end()
