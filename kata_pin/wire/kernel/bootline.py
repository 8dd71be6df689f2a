"""/proc/cmdline: the parameters that the kernel was booted with.

Facts: Documentation/admin-guide/kernel-parameters.rst. Double quotes protect spaces, `--` ends the
kernel's own, and `-` and `_` are the same in a name.
"""

from __future__ import annotations

import re
from typing import Final

from kata_pin.wire.kernel.numbers import check_size

MAX_TEXT: Final = 64 * 1024
"""Longest command line that is read; x86 has 2 KiB, arm64 as well, s390 at most 64 KiB."""

_WORD: Final = re.compile(r'(?:[^\s"]|"[^"]*"?)+')


def parse_bootline(data: bytes) -> dict[str, str]:
    """Return the parameters with their last values, empty for a bare word; raises ParseError."""
    check_size(data, MAX_TEXT, "/proc/cmdline")
    found: dict[str, str] = {}
    for word in _WORD.findall(data.decode("utf-8", "backslashreplace")):
        if word == "--":
            break
        name, _, value = word.replace('"', "").partition("=")
        found[name.replace("-", "_")] = value
    return found
