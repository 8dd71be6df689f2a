"""What one sandbox leaves on the machine, written down at once so that purge can end it all.

ROOT/.pids has a line `pid starttime` for each process, ROOT/.cgroups one for each folder made in
/sys/fs/cgroup. Nothing is ever taken out of them but by purge. It also carries the service's log,
ROOT/.log/<sandbox>. ROOT is the parent of the sandbox's folder, HOME.
"""

from __future__ import annotations

import os
import sys
from typing import Final


class Ledger:
    """The notes of one sandbox."""

    def __init__(self, home: str) -> None:
        self.home: Final = home

    def say(self, text: str) -> None:
        """Write a line to the log."""
        print(text, file=sys.stderr, flush=True)

    def note_process(self, pid: int) -> None:
        """Note a process; one that is gone already needs no note."""
        started = starttime(pid)
        if started:
            self._append(".pids", f"{pid} {started}")

    def note_cgroup(self, folder: str) -> None:
        """Note a cgroup folder."""
        self._append(".cgroups", folder)

    def _append(self, name: str, line: str) -> None:
        with open(f"{os.path.dirname(self.home)}/{name}", "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def starttime(pid: int) -> int:
    """Return when a process started (proc(5)), 0 when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(") ")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
