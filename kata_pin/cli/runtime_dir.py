"""The daemon's directory, read from a configuration without a parser of YAML."""

from __future__ import annotations

import os
import stat

DEFAULT_FILE = "/etc/kata-pin/config.yaml"
RUNTIME_DIR = "/run/kata-pin"
"""Both as in kata_pin.base.config, whose import costs more than a question to the daemon."""

_KEY = "runtime_dir"


def plain_runtime_dir(path: str) -> str | None:
    """Return the directory that a file names, or the default; None if it takes a parser to know.

    The default also where there is no file.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a FIFO would hang
            return None
        with open(path, encoding="utf-8") as file:
            lines = [one for one in file if _KEY in one and not one.lstrip().startswith("#")]
    except FileNotFoundError:
        return RUNTIME_DIR
    except (OSError, ValueError):  # not text, or no path
        return None
    if not lines:
        return RUNTIME_DIR
    key, _, text = lines[0].partition(":")
    value = text.partition(" #")[0].strip()
    is_plain = value.startswith("/") and not any(one in value for one in " \t'\"#")
    if (
        key == _KEY
        and text.startswith((" ", "\t"))
        and is_plain
        and "".join(lines).count(_KEY) == 1
    ):
        return value
    return None
