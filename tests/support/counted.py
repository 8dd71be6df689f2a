"""Runs a program of kata-pin that notes each request to its broker, and to the broker's children.

    python -P tests/support/counted.py FILE PROGRAM [ARGUMENT...]

A line of the file has a row's name. A daemon without rights reads itself what needs none, so the
lines are what it cannot do alone.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kata_pin.rights import client_children
from kata_pin.rights.broker.rows import Value
from kata_pin.rights.client import BrokerCalls


def counted(file: Path) -> tuple[str, ...]:
    """Return what to put before a program and its arguments."""
    return sys.executable, "-P", __file__, str(file)


class Requests:
    """What a counted daemon has asked for."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = 0

    def taken(self) -> list[str]:
        """Return the rows that were asked for since the last call, in order."""
        rows = self._file.read_text().split() if self._file.exists() else []
        new, self._seen = rows[self._seen :], len(rows)
        return new


def _count(file: str) -> None:
    """Note each request from now on; the file stays open when rights are given up."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    exchange, request_of = BrokerCalls._exchange, client_children.request_of

    def exchanged(
        calls: BrokerCalls, name: str, values: Mapping[str, Value], descriptors: Sequence[int]
    ) -> tuple[bytes, list[int]]:
        os.write(fd, f"{name}\n".encode())
        return exchange(calls, name, values, descriptors)

    def requested(name: str, values: Mapping[str, Value]) -> bytes:
        os.write(fd, f"{name}\n".encode())
        return request_of(name, values)

    setattr(BrokerCalls, "_exchange", exchanged)  # noqa: B010
    setattr(client_children, "request_of", requested)  # noqa: B010


if __name__ == "__main__":
    _count(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
