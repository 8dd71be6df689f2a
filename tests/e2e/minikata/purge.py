"""Ends everything below a minikata root: services, QEMUs, virtiofsds, links, and its cgroups.

For tests, at their end and after a failure: `minikata --root R purge`. Processes are known by pid
and start time. Cgroups are removed if empty. One with other roots' cgroups in it stays; one with
processes is named, and the exit status is 1.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

sys.path.insert(0, os.path.realpath(f"{os.path.dirname(__file__)}/../../.."))

from tests.e2e.minikata.ledger import starttime

DEADLINE_S = 10.0 * float(os.environ.get("KATA_PIN_WAIT_SCALE", "1"))


def main(root: str) -> int:
    """Purge; return the exit status."""
    if not os.path.isdir(root):
        return 0
    _end(f"{root}/.pids")
    for entry in os.scandir(root):
        if entry.is_symlink():
            os.unlink(entry.path)
        elif entry.is_dir() and entry.name == ".log":
            shutil.rmtree(entry.path)
        elif entry.is_dir():
            for name in os.listdir(entry.path):
                os.unlink(f"{entry.path}/{name}")
            os.rmdir(entry.path)
    left = _remove_cgroups(f"{root}/.cgroups")
    for path in left:
        print(f"not empty: {path}", file=sys.stderr)
    if not left:
        os.rmdir(root)
    return 1 if left else 0


def _end(path: str) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            noted = [tuple(map(int, line.split())) for line in file]
    except FileNotFoundError:
        return
    for pid, started in noted:
        if starttime(pid) == started:
            with contextlib.suppress(ProcessLookupError):  # ended with its service just now
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while any(starttime(pid) == started for pid, started in noted) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.unlink(path)


def _remove_cgroups(ledger: str) -> list[str]:
    """Remove the folders noted in the ledger, the deepest first; return those that stay."""
    if not os.path.exists(ledger):
        return []
    with open(ledger, encoding="utf-8") as file:
        folders = sorted(set(file.read().split("\n")) - {""}, key=len, reverse=True)
    left = [folder for folder in folders if not _remove(folder)]
    os.unlink(ledger)
    return left


def _remove(folder: str) -> bool:
    """Remove a cgroup, once the last thread of what was in it has gone; return whether it was.

    One with other cgroups below it stays: ours are gone, so it is another root's too.
    """
    deadline = time.monotonic() + DEADLINE_S
    while os.path.isdir(folder):
        try:
            if any(entry.is_dir() for entry in os.scandir(folder)):
                break
            os.rmdir(folder)
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
