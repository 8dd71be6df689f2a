"""Log lines for the journal, or for a terminal (STYLE: one line a fact, greppable by sandbox).

Under systemd each line begins with its priority in angle brackets (sd-daemon(3)); elsewhere with
its level's name.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Final

_PRIORITIES: Final = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}


class JournalFormatter(logging.Formatter):
    """Puts sd-daemon(3)'s priority before each line, also of a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines."""
        prefix = f"<{_PRIORITIES.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def set_up(level: str, environ: Mapping[str, str]) -> None:
    """Log to standard error from `level` on; JOURNAL_STREAM says that the journal reads it."""
    handler = logging.StreamHandler(sys.stderr)
    if environ.get("JOURNAL_STREAM"):
        handler.setFormatter(JournalFormatter("%(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Log from another level on."""
    logging.getLogger("kata_pin").setLevel(level.upper())
