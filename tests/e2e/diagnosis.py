"""What a failing test leaves: the journal since it began, threads and cgroups, kata-pin's view."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Final

from tests.e2e.node import Node
from tests.support.daemon import Node as PrivateNode
from tests.support.daemon import Refused

LOG_BYTES: Final = 500_000
"""What is kept of a private daemon's log: its end."""


def collect(
    node: Node, name: str, began: float, report: str, *, private: PrivateNode | None = None
) -> Path:
    """Write everything that helps to understand the failure of test `name`; return the folder.

    `private` is the daemon that the test had for itself; the journal and `kata-pin show` are the
    installed one's.
    """
    folder = node.results_folder() / "failures" / re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text(report)
    (folder / "threads.txt").write_text(thread_table())
    since = f"@{began:.0f}"
    for file, argv in {
        "journal.txt": ["journalctl", "--no-pager", "-o", "short-precise", "--since", since],
        "kernel.txt": ["dmesg"],
        "cgroups.txt": ["systemd-cgls", "--no-pager", "--full"],
        "units.txt": ["systemctl", "--no-pager", "--all", "list-units"],
        "kata-pin-show.json": ["kata-pin", "show", "--json"],
    }.items():
        (folder / file).write_text(_output(argv, 20 * node.scale))
    if private is not None:
        (folder / "private-daemon.log").write_text(private.log[-LOG_BYTES:])
        (folder / "private-state.json").write_text(_state(private))
    return folder


def _state(daemon: PrivateNode) -> str:
    try:
        return json.dumps(daemon.ask("state"), indent=1)
    except (OSError, Refused) as error:
        return f"{error}\n"


def _output(argv: list[str], seconds: float) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}\n"
    return done.stdout + done.stderr


def thread_table() -> str:
    """Return a line for each thread of VMMs, their helpers and vhost workers."""
    lines = [f"{'PID':>7} {'TID':>7} {'CPU':>4} {'MASK':<16} {'COMM':<16} CGROUP"]
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            comm = (process / "comm").read_text().strip()
            if not comm.startswith(("qemu", "vhost-", "virtiofsd", "kvm-", "containerd-shim")):
                continue
            tasks = sorted((process / "task").iterdir(), key=lambda path: int(path.name))
            lines += [_thread_line(process.name, task) for task in tasks]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return "\n".join(lines) + "\n"


def _thread_line(pid: str, task: Path) -> str:
    stat = (task / "stat").read_text()
    comm = stat[stat.index("(") + 1 : stat.rindex(")")]
    last_cpu = stat.rpartition(")")[2].split()[36]
    status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
    mask = status["Cpus_allowed_list"].strip()
    cgroup = (task / "cgroup").read_text().strip().replace("\n", " ")
    return f"{pid:>7} {task.name:>7} {last_cpu:>4} {mask:<16} {comm:<16} {cgroup}"
