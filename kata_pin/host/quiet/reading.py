"""Small reads that give a value, or why there is none: a report is made of what can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kata_pin.errors import HostError, ParseError
from kata_pin.host.files import TEXT_BYTES, read_bytes
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.quiet.node import Unknown
from kata_pin.wire.kernel.masks import parse_mask

Value = TypeVar("Value")

_ABSENT = (FileNotFoundError, NotADirectoryError)


def known(path: str, parse: Callable[[bytes], Value], limit: int = TEXT_BYTES) -> Value | Unknown:
    """Return what a file holds, Unknown where it cannot be read or makes no sense."""
    try:
        return parse(read_bytes(path, limit))
    except OSError as error:
        return unreadable(path, error)
    except (ParseError, HostError) as error:
        return Unknown(error.message)
    except ValueError:
        return Unknown(f"{path} has an unexpected form")


def unreadable(path: str, error: OSError) -> Unknown:
    """Return why a file is not known; `absent` where it does not exist."""
    if isinstance(error, _ABSENT):
        return Unknown(f"{path} does not exist", absent=True)
    return Unknown(f"{path}: {error.strerror or 'unknown error'}")


def text(data: bytes) -> str:
    """Return a file's text without white space around it."""
    return data.decode("utf-8", "backslashreplace").strip()


def cpu_list(path: str) -> CpuSet | Unknown:
    """Return a file's cpu list; `(null)` is how nohz_full says none."""

    def parse(data: bytes) -> CpuSet:
        found = text(data)
        return CpuSet.parse("" if found == "(null)" else found, source=path)

    return known(path, parse)


def mask(path: str) -> CpuSet | Unknown:
    """Return a file's hexadecimal mask."""
    return known(path, lambda data: parse_mask(data, path))
