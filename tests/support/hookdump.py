"""An OCI hook that writes down what it was given, in the form of the recordings from real Kata.

    hooks = dumping_hooks(folder, PHASES)      # for a config.json
    for dump in dumps(folder): dump["hook"], dump["state"] ...

As a program: `hookdump.py FOLDER PHASE [QMP_SOCKET]`; with a socket it also notes whether QMP
greets within 0.3 s.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GREETING_S = 0.3


def dumping_hooks(
    folder: Path, phases: Iterable[str], qmp: Path | str = "", **more: Any
) -> dict[str, list[dict[str, Any]]]:
    """Return the `hooks` object of a config.json; `more` are other keys of each hook."""
    program = os.path.realpath(__file__)
    arguments = ["/usr/bin/python3", "-IS", program, str(folder)]
    return {
        phase: [{"path": "/usr/bin/python3", "args": [*arguments, phase, str(qmp)], **more}]
        for phase in phases
    }


def dumps(folder: Path) -> list[dict[str, Any]]:
    """Return what was written, in the order of the calls; `state` is stdin, parsed."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.dump"))]
    return [{**one, "state": json.loads(one["stdin"])} for one in found]


def _dump(folder: str, phase: str, qmp: str) -> dict[str, Any]:
    return {
        "hook": phase,
        "argv": sys.argv,
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "stdin": sys.stdin.read(),
        "ppid": os.getppid(),
        "cgroup": Path("/proc/self/cgroup").read_text().splitlines(),
        "netns": os.readlink("/proc/self/ns/net"),
        "fds": {n: os.readlink(f"/proc/self/fd/{n}") for n in ("0", "1", "2")},
        "qmp_greets": bool(qmp) and _greets(qmp),
        "files": sorted(os.listdir(folder)),
    }


def _greets(path: str) -> bool:
    import socket

    with socket.socket(socket.AF_UNIX) as monitor:
        monitor.settimeout(GREETING_S)
        try:
            monitor.connect(path)
            return b"QMP" in monitor.recv(4096)
        except OSError:
            return False


if __name__ == "__main__":
    target = f"{sys.argv[1]}/{time.monotonic_ns():020}-{sys.argv[2]}"
    text = json.dumps(_dump(*sys.argv[1:4]))
    Path(f"{target}.part").write_text(text)
    os.rename(f"{target}.part", f"{target}.dump")
