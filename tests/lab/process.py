"""Running the lab's own commands: a deadline on each, and nothing left behind.

A command gets a session of its own; whatever ends the wait (deadline, interrupt, error) ends the
whole process group. Commands that could mount anything run in a private mount and pid namespace,
so that even a kill of the lab itself leaves no mount and no process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.lab.errors import DeadlineError, LabError

PRIVATE: Final = (
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"),
    "--",
)
"""Prefix for a command that may mount: its mounts and children end with it."""


def run(
    argv: Sequence[str],
    *,
    deadline_s: float,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run `argv` at low priority with its output appended to `log`.

    Raises LabError with the end of the log when it fails, DeadlineError when it takes too long.
    """
    with log.open("ab") as out:
        start = out.tell()
        out.write(f"+ {' '.join(argv)}\n".encode())
        out.flush()
        child = subprocess.Popen(
            ["nice", "-n", "10", *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(env) if env is not None else None,
            cwd=cwd,
        )
        try:
            code = child.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"{argv[0]} took over {deadline_s:.0f} s; log: {log}") from None
        finally:
            end_group(child)
    if code != 0:
        raise LabError(f"{argv[0]} failed with {code}; log {log} ends:\n{tail(log, start)}")


def end_group(child: subprocess.Popen[bytes], patience_s: float = 5) -> None:
    """End the process group of `child`, kindly, then surely; does nothing when it has ended."""
    for number, patience in ((signal.SIGTERM, patience_s), (signal.SIGKILL, patience_s)):
        if child.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def tail(file: Path, start: int = 0, lines: int = 25) -> str:
    """Return the last lines of `file`, from byte `start` on; empty if there is no such file."""
    try:
        with file.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(start, end - 16384))
            text = stream.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks (proc(5), stat field 22); 0 if gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def end_process(pid: int, started: int, patience_s: float = 10) -> None:
    """End the process that is `pid` and began at `started`, and no other that got its number."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if start_time(pid) != started:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        limit = time.monotonic() + patience_s
        while start_time(pid) == started and time.monotonic() < limit:
            time.sleep(0.05)
    if start_time(pid) == started:
        raise LabError(f"process {pid} does not end")
