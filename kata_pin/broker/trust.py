"""Whose files and peers are believed beside root's."""

from __future__ import annotations

import os


def trusted_uid() -> int:
    """Return our user, if it is a person's; a service's user, who has capabilities, is not trusted.

    The service gives them up later, and its user may be shared (D23).
    """
    with open("/proc/self/status", "rb", buffering=0) as file:
        lines = file.read(8192).split(b"\n")
    capable = any(line.startswith(b"CapEff:") and int(line.split()[1], 16) for line in lines)
    return 0 if capable else os.geteuid()
