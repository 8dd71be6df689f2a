"""Ids and names that come from outside: one rule for what is accepted.

Sandbox and container ids become file names, keys and words in logs, so they are checked where they
enter. Kubernetes' own names are DNS labels and pass; anything with a slash, a space or a control
character does not.
"""

from __future__ import annotations

import re
from typing import Final

from kata_pin.errors import ParseError

MAX_ID: Final = 128

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}\Z")


def is_id(text: str) -> bool:
    """Return whether `text` can be a container or sandbox id (containerd and CRI-O agree)."""
    return _ID.match(text) is not None


def check_id(text: str, *, source: str) -> str:
    """Return `text`, or raise ParseError when it cannot be an id."""
    if not is_id(text):
        raise ParseError("not a container id", source=source, text=text or "(empty)")
    return text


def is_name(text: str) -> bool:
    """Return whether `text` can be a Kubernetes name or uid (at most 253 characters)."""
    return _NAME.match(text) is not None
