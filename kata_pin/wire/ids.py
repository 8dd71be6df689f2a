"""Ids, names and other short texts from outside: what is accepted, and what is shown of them.

Sandbox and container ids become file names, keys and words in logs, so they are checked where they
enter. Kubernetes' own names are DNS labels and pass; anything with a slash, a space or a control
character does not.
"""

from __future__ import annotations

import re
from typing import Final

from kata_pin.errors import ParseError

MAX_SHOWN: Final = 200
"""Longest text of a guest or a runtime that is kept: a version, a feature, an error message."""

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}\Z")


def is_id(text: str) -> bool:
    """Return whether `text` can be a container or sandbox id of containerd or CRI-O."""
    return _ID.match(text) is not None


def check_id(text: str, *, source: str) -> str:
    """Return `text`, or raise ParseError when it cannot be an id."""
    if not is_id(text):
        raise ParseError("not a valid container id", source=source, text=text or "(empty)")
    return text


def is_name(text: str) -> bool:
    """Return whether `text` can be a Kubernetes name or uid (at most 253 characters)."""
    return _NAME.match(text) is not None


def printable(text: str) -> str:
    """Return a foreign text fit for a log: at most MAX_SHOWN characters, all of them printable."""
    return one_line(text[:MAX_SHOWN]) + ("..." if len(text) > MAX_SHOWN else "")


def one_line(text: str) -> str:
    """Return a foreign text of any length, all of its characters printable."""
    line = " ".join(text.splitlines())
    if not line.isprintable():
        line = "".join(char if char.isprintable() else "?" for char in line)
    return line
