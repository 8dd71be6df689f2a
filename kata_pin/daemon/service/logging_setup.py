"""Log lines for the journal, or for a terminal: one line per fact."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from kata_pin.daemon.journal import PRIORITIES, SOCKET, JournalHandler, reads_stderr
from kata_pin.wire.ids import one_line


class OneLineFormatter(logging.Formatter):
    """Makes one line of each message: names in it may come from anybody, with any characters."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the record's line; a traceback has its own."""
        return one_line(super().formatMessage(record))


class JournalFormatter(OneLineFormatter):
    """Puts sd-daemon(3)'s priority before each line, also of a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines."""
        prefix = f"<{PRIORITIES.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def set_up(level: str, environ: Mapping[str, str], *, journal: str = SOCKET) -> None:
    """Log from `level` on, to the journal's socket where the journal reads standard error."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if reads_stderr(environ):
        handler.setFormatter(JournalFormatter("%(message)s"))
        if os.path.exists(journal):
            handler = JournalHandler(journal, fallback=handler)
            handler.setFormatter(OneLineFormatter("%(message)s"))
    else:
        handler.setFormatter(OneLineFormatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Log from another level on."""
    logging.getLogger("kata_pin").setLevel(level.upper())
