"""One run of the command line: its options, what follows from them, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from kata_pin.base.errors import KataPinError, reason_of
from kata_pin.cli.quick import DEFAULT_FILE, plain_runtime_dir
from kata_pin.cli.render import screen

if TYPE_CHECKING:
    from kata_pin.base.config.tree import Config
    from kata_pin.cli.client import Provider


class Session:
    """The options of one run, and what follows from them; what costs is made when needed."""

    def __init__(self, config_file: str | None = None) -> None:
        self.config_file = config_file
        self.debug = False
        self.json = False
        self._provider: Provider | None = None

    @cached_property
    def runtime_dir(self) -> str:
        """The daemon's directory; the file is read as YAML only if it is not plain to see.

        So people can ask a daemon that runs although its file has been damaged since.
        """
        if self.config_file and not os.path.lexists(self.config_file):
            return self.config.runtime_dir  # which raises what is wrong
        return plain_runtime_dir(self.config_file or DEFAULT_FILE) or self.config.runtime_dir

    @cached_property
    def config(self) -> Config:
        """The configuration; raises ConfigError."""
        from kata_pin.service.configuration import load

        return load(self.config_file)

    def connect(self) -> Provider:
        """Move this process off exclusive pCPUs; return where documents come from."""
        from kata_pin.cli.client import Provider
        from kata_pin.hook import leave_exclusive_cpus

        leave_exclusive_cpus(self.runtime_dir)
        if self._provider is None:
            self._provider = Provider(self)
        return self._provider


def ended(session: Session, command: Callable[[], int]) -> int:
    """Run a command to its end; return the exit status.

    Expected failures are one line and a hint on stderr, never a traceback. Exit statuses are those
    of base/errors.py, 130 after Ctrl-C, 141 if the reader of the output went away.
    """
    screen.tolerate_any_text()
    try:
        status = command()
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        return 141
    except KeyboardInterrupt:
        return 130
    except KataPinError as error:
        return _failed(session, error, error.exit_code)
    except OSError as error:  # our own reads are translated; what is left is the output
        _forget_stdout()
        place = "" if error.filename else "standard output: "
        failure = KataPinError(f"{place}{reason_of(error)}")
        failure.__cause__ = error
        return _failed(session, failure, 1)
    except Exception as error:  # noqa: BLE001 - the last barrier: no traceback unless asked for
        unexpected = KataPinError(
            f"unexpected {type(error).__name__}: {reason_of(error)}",
            hint="this is a bug in kata-pin; --debug prints the traceback",
        )
        unexpected.__cause__ = error
        return _failed(session, unexpected, 1)
    return status


def _failed(session: Session, error: KataPinError, status: int) -> int:
    """Print an error: one line and a hint, and a JSON document with --json."""
    if session.debug:
        import traceback

        traceback.print_exception(error)
    if session.json:
        print_error(error.message, error.hint, status)
    screen.failure(error)
    return status


def print_error(message: str, hint: str, status: int) -> None:
    """Print an error as a JSON document."""
    from kata_pin.base.documents.answers import ErrorDocument

    screen.document(ErrorDocument(error=message, hint=hint, exit_status=status))


def _forget_stdout() -> None:
    """Redirect stdout to /dev/null, so that the interpreter's last flush does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
