"""The recordings of real Kata in tests/data, by kind of file (provenance: the README there)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"
FOLDERS = ("kata-1.13", "kata-3.21", "kata-3.21-kernel-6.12", "kata-3.32-kubelet-1.34", "kata-4.1")


def files(pattern: str) -> list[Path]:
    """Return the recorded files that match, sorted."""
    return sorted(path for folder in FOLDERS for path in (DATA / folder).glob(pattern))


def label(path: Path) -> str:
    """Return a short name for test ids."""
    return str(path.relative_to(DATA))


@dataclass(frozen=True)
class HookInput:
    """What one hook was given."""

    phase: str
    stdin: bytes
    config: bytes | None
    recorded: dict[str, Any]


def hook_input(path: Path) -> HookInput:
    """Read a hooks*/PHASE.json; config is what the bundle's config.json said, as a config.json."""
    recorded = json.loads(path.read_text())
    bundle = recorded["bundle_config"]
    config = None
    if isinstance(bundle, dict):
        config = json.dumps(
            {
                "annotations": bundle["annotations"],
                "linux": {
                    "cgroupsPath": bundle["cgroupsPath"],
                    "resources": {"cpu": bundle["cpu"]},
                },
            }
        ).encode()
    return HookInput(recorded["hook"], recorded["stdin"].encode(), config, recorded)


def argv(path: Path) -> list[str]:
    """Read a qemu-cmdline.txt: one argument a line below a comment."""
    return path.read_text().splitlines()[1:]


@dataclass(frozen=True)
class RecordedThread:
    """One line of qemu-threads.txt; `cgroup` as /proc/<tid>/cgroup has it."""

    tid: int
    comm: str
    cpus: str
    cgroup: bytes


def threads(path: Path) -> list[RecordedThread]:
    """Read a qemu-threads.txt."""
    return [_thread(line) for line in path.read_text().splitlines()[1:]]


def _thread(line: str) -> RecordedThread:
    match = re.fullmatch(r"(\d+) ('.*?') (\[.*?\]) (\[.*\])", line)
    assert match is not None, line
    comm, (cpus,), groups = (ast.literal_eval(part) for part in match.groups()[1:])
    lines = [f"{0 if group.startswith(':') else 9}:{group}\n" for group in groups]
    return RecordedThread(int(match[1]), comm, cpus, "".join(lines).encode())


@dataclass(frozen=True)
class RecordedProcess:
    """A qemu-status-cgroup-fd.txt: /proc/<pid>/status and cgroup, and descriptor targets."""

    status: bytes
    cgroup: bytes
    links: dict[int, str]


def process(path: Path) -> RecordedProcess:
    """Read a qemu-status-cgroup-fd.txt."""
    status, rest = path.read_text().split("\n--cgroup\n")
    cgroup, rest = rest.split("\n--fd\n")
    pairs = (line.split(" -> ") for line in rest.splitlines() if " -> " in line)
    links = {int(number): target for number, target in pairs}
    return RecordedProcess(status.encode(), cgroup.encode(), links)


def qmp_replies(path: Path) -> Iterator[dict[str, Any]]:
    """Yield {command: return value} for each session of a qmp.txt that got a greeting."""
    replies: dict[str, Any] = {}
    command = ""
    for line in path.read_text().splitlines():
        if line.startswith("-> "):
            command = json.loads(line[3:])["execute"]
        elif line.startswith("<- ") and command:
            replies[command] = json.loads(line[3:])["return"]
        elif line.startswith("# took"):
            if replies:
                yield replies
            replies, command = {}, ""
