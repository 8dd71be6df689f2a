"""Traces of pods, and what the real kubelet of scripts/kubelet gives them.

    trace = record(folder, cpus, Setup(reserved="0"), make_steps(seed=1, count=30, cpus=16))

A trace has the format of tests/data/oracles/README.md, so `scripts/oracle` can run it too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

PROJECT: Final = Path(__file__).resolve().parents[2]

NEWEST: Final = (PROJECT / "tests/kubelet/newest").read_text().strip()
"""The newest release that is run beside that of go.mod."""

ROLES: Final = (*((),) * 6, ("init",), ("sidecar",), ("init", "sidecar"), ("init", "init"))
"""What a pod's containers before its apps are."""

PLAY_S: Final = 170.0
"""Longest time for a trace: the namespaces end with the process that is killed then."""

MILLIS: Final = (1000, 1000, 2000, 2000, 3000, 4000, 6000, 8000, 500, 1500)

EVEN_MILLIS: Final = (2000, 2000, 4000, 6000, 8000, 500)


@dataclass(frozen=True)
class Setup:
    """A kubelet's settings, by the names of its configuration file."""

    reserved: str
    options: Mapping[str, str] = field(default_factory=dict)
    topology_manager: str = "none"
    scope: str = "container"


@cache
def programs(release: str = "") -> Path:
    """Return the folder in which scripts/kubelet puts the two programs of a release.

    Without one, it is the release of go.mod.
    """
    command = [str(PROJECT / "scripts" / "kubelet"), *filter(None, [release]), "--where"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def why_not(release: str = "") -> str:
    """Return why no kubelet can be run here, empty if one can."""
    if os.geteuid() != 0:
        return "needs root: namespaces and mounts"
    if not (programs(release) / "kubelet").exists():
        if shutil.which("go") is None:
            return "no Go here to build a kubelet with"
        return "no kubelet here: scripts/kubelet builds it (once, some minutes)"
    return ""


def make_steps(seed: int, count: int, cpus: int, *, even: bool = False) -> list[dict[str, Any]]:
    """Return steps of a trace without answers: pods added, removed, and changed.

    A changed pod is what a rewritten static manifest makes: another pod in the place of `old`.
    `even`: most pods ask for even numbers of CPUs, as full-pcpus-only wants it.
    """
    chance = random.Random(seed)
    alive: list[str] = []
    steps: list[dict[str, Any]] = []
    for _ in range(count):
        act = chance.choice(("add", "add", "add", "del", "del", "change"))
        pod = str(uuid.UUID(int=chance.getrandbits(128), version=4))
        if act == "add" or not alive:
            steps.append(
                {"op": "add", "pod": pod, "containers": make_containers(chance, cpus, even=even)}
            )
            alive.append(pod)
            continue
        old = alive.pop(chance.randrange(len(alive)))
        if act == "del":
            steps.append({"op": "del", "pod": old})
            continue
        containers = make_containers(chance, cpus, even=even)
        steps.append({"op": "change", "pod": pod, "old": old, "containers": containers})
        alive.append(pod)
    return steps


def make_containers(chance: random.Random, cpus: int, *, even: bool) -> list[dict[str, Any]]:
    """Return a pod's containers; one pod in eight is not Guaranteed."""
    choices = EVEN_MILLIS if even and chance.random() < 0.9 else MILLIS
    roles = (*chance.choice(ROLES), *("app",) * chance.choice((1, 1, 2, 3)))
    containers = []
    for number, role in enumerate(roles):
        millis = min(chance.choice(choices), cpus * 500)
        containers.append(
            {
                "name": f"{role[0]}{number}",
                "role": role,
                "request_m": millis,
                "limit_m": millis,
                "memory_equal": True,
            }
        )
    if chance.random() < 1 / 8:
        change = chance.choice(({"limit_m": 20000}, {"memory_equal": False}, {"request_m": 100}))
        containers[-1].update(change)
    return containers


def record(
    folder: Path,
    cpus: Sequence[Mapping[str, int]],
    setup: Setup,
    steps: Sequence[Mapping[str, Any]],
    release: str = "",
) -> dict[str, Any]:
    """Return the trace of these steps, with a kubelet's answers, on a host of these CPUs.

    Raises AssertionError, with the end of the kubelet's log, if it does not answer.
    """
    return {**asdict(setup), "ops": play(folder, cpus, setup, steps, release)["ops"]}


def play(
    folder: Path,
    cpus: Sequence[Mapping[str, int]],
    setup: Setup,
    steps: Sequence[Mapping[str, Any]],
    release: str = "",
    **more: object,
) -> dict[str, Any]:
    """Return all that a kubelet answered (tests/kubelet/stage.py); `more` is the order's rest."""
    folder.mkdir(parents=True, exist_ok=True)
    order = {
        "folder": str(folder),
        "kubelet": str(programs(release) / "kubelet"),
        "fakecri": str(programs(release) / "fakecri"),
        "cpus": list(cpus),
        "ops": list(steps),
        **asdict(setup),
        **more,
    }
    command = [
        *("unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"),
        *(sys.executable, "-m", "tests.kubelet.stage"),
    ]
    played = subprocess.run(
        command,
        input=json.dumps(order),
        capture_output=True,
        text=True,
        cwd=PROJECT,
        timeout=PLAY_S,
        check=False,
    )
    assert played.returncode == 0, played.stderr
    answered: dict[str, Any] = json.loads(played.stdout)
    return answered
