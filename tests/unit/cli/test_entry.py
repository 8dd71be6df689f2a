"""The program `kata-pin`: where it runs while it imports the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

PROJECT: Final = Path(__file__).parents[3]

PROGRAM: Final = """
import importlib, json, os, sys
class Look:
    def find_spec(self, name, path=None, target=None):
        if name not in seen:
            seen[name] = sorted(os.sched_getaffinity(0))
seen = {}
sys.meta_path.insert(0, Look())
module, name = sys.argv.pop(1).split(":")
sys.argv[0] = "kata-pin"
os._exit = sys.exit
try:
    getattr(importlib.import_module(module), name)()
except SystemExit:
    pass
sys.stdout = sys.stderr
os.write(3, json.dumps(seen).encode())
"""
"""Runs the entry point as the installed program does, and says where each module was imported."""

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")

CPUS: Final = sorted(os.sched_getaffinity(0))


def imported(folder: Path, *arguments: str) -> dict[str, list[int]]:
    """Run the program; return on which CPUs each module could have been imported."""
    (folder / "free-cpus").write_text(f"{1 << CPUS[0]:x}\n")
    scripts: Any = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]
    answer = folder / "answer"
    with answer.open("wb") as file:
        subprocess.run(
            [sys.executable, "-c", PROGRAM, scripts["kata-pin"], *arguments],
            check=True,
            capture_output=True,
            preexec_fn=lambda: os.dup2(file.fileno(), 3),
            pass_fds=(3,),
            timeout=60,
        )
    found: dict[str, list[int]] = json.loads(answer.read_text())
    return found


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("command", [("completion", "bash"), ("config", "show"), ("show", "x")])
def test_a_command_leaves_exclusive_pcpus_before_it_imports(
    tmp_path: Path, command: tuple[str, ...], *, joined: bool
) -> None:
    """Only what the entry itself needs is imported where the command was started."""
    config = tmp_path / "config.yaml"
    config.write_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    where = (f"--config={config}",) if joined else ("--config", str(config))
    found = imported(tmp_path, *where, *command)
    assert found["kata_pin.cli.entry"] == CPUS
    assert found["kata_pin.cli.session"] == CPUS[:1]
    late = {name for name, cpus in found.items() if name.startswith("kata_pin") and cpus == CPUS}
    assert late - {"kata_pin", "kata_pin.cli"} == {
        "kata_pin.cli.entry",
        "kata_pin.cli.quick",
        "kata_pin.hook",
    }


@pytest.mark.parametrize("command", ["run", "reporter"])
def test_what_runs_for_long_stays(tmp_path: Path, command: str) -> None:
    """The pCPUs that are free now are not those that are free later."""
    config = tmp_path / "config.yaml"
    config.write_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    assert imported(tmp_path, "--config", str(config), command, "--help")["click"] == CPUS
