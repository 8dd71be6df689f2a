"""The program `kata-pin`: leaves exclusive pCPUs, and imports the command line only then.

Importing takes most of the time of a command, so it must not happen on a pod's exclusive pCPU.
What is imported here, and what these import, is built into the interpreter or loaded by it
anyway.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from kata_pin.cli.quick import DEFAULT_FILE, action, answered, plain_runtime_dir
from kata_pin.hook import leave_exclusive_cpus

_STAY = frozenset({"run", "reporter"})
"""Commands that do not end: the daemon moves itself, and a reporter is confined by its pod."""

COLLECTED = 100_000
"""Objects before Python looks for cycles among them: what a command reads is used to its end."""


def main() -> None:
    """Run the command line and exit."""
    arguments = sys.argv[1:]
    ends = _STAY.isdisjoint(arguments)  # not so with a sandbox of that name, which does no harm
    if ends:
        runtime_dir = plain_runtime_dir(_config_file(arguments))
        if runtime_dir is not None:
            leave_exclusive_cpus(runtime_dir)
        gc.set_threshold(COLLECTED)
    bound()  # before logging is imported, which asks for the time
    status = 0 if answered(arguments) else _run(arguments)
    if ends:
        _end(status)
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    plain = action(arguments)
    if plain is not None:
        from kata_pin.cli.actions import act

        return act(plain)
    from kata_pin.cli.main import run

    return run(arguments)


def _end(status: int) -> None:
    """End this process at once: taking its modules apart takes a tenth of a command's time.

    No command leaves anything to be done then, and what it prints it has flushed.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed, or none: the command has said so
        pass
    os._exit(status)


def _config_file(arguments: list[str]) -> str:
    """Return the configuration's path as the command line will read it."""
    path = DEFAULT_FILE
    for number, argument in enumerate(arguments):
        name, is_joined, value = argument.partition("=")
        if name == "--config":
            path = value if is_joined else "".join(arguments[number + 1 : number + 2])
    return path


# A wall clock beyond what Python can tell: from 2262-04-11 on time.time() raises OverflowError.
#
# Then importing `logging` fails, and every log record ends the daemon. What kata-pin decides by is
# CLOCK_BOOTTIME and CLOCK_MONOTONIC, which such a clock does not touch.

_LATEST_NS = 2**63 - 1
_time, _time_ns = time.time, time.time_ns


def bound() -> None:
    """Have time.time and time.time_ns return the latest time that there is, where they raise."""
    time.time, time.time_ns = _bounded, _bounded_ns


def _bounded() -> float:
    try:
        return _time()
    except OverflowError:
        return _LATEST_NS / 1e9


def _bounded_ns() -> int:
    try:
        return _time_ns()
    except OverflowError:
        return _LATEST_NS
