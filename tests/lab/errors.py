"""Errors of the lab; each ends the command with its own exit code."""

from __future__ import annotations

from typing import Final

EX_NOT_UP: Final = 75
"""Exit code (EX_TEMPFAIL) of a machine that did not come up: the tests were not run."""


EX_NOT_BUILT: Final = 77
"""Exit code of a program that the tests need and this machine cannot build: they were not run."""


class LabError(Exception):
    """Something the lab needs is missing or failed; the message says what."""

    exit_code = 1


class DeadlineError(LabError):
    """A wait ended without what was waited for."""


class GoneError(LabError):
    """The machine ended while something waited for it."""


class NotBuiltError(LabError):
    """A program that was asked for cannot be built here."""

    exit_code = EX_NOT_BUILT


class NotUpError(LabError):
    """A lab machine did not come up; `console` is the end of what it printed."""

    exit_code = EX_NOT_UP

    def __init__(self, message: str, *, console: str = "") -> None:
        super().__init__(
            f"{message}\n--- end of its console ---\n{console}" if console else message
        )
        self.console = console
