"""What the lab promised about the machine that these tests run in."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VARIABLE: Final = "KATA_PIN_LAB"
"""Environment variable with the promises as JSON; set by `scripts/lab test` only."""

PAUSE_S: Final = 0.02
"""Time between two looks at a condition; multiplied by the scale, for a look costs more there."""


@dataclass(frozen=True, slots=True)
class Node:
    """The promises of a flavour (tests/lab/flavours.py), and where results go."""

    flavour: str
    suite: str
    accel: str
    scale: float
    """Deadlines are multiplied by this: 1 under KVM, 10 under emulation."""
    cpus: int
    nodes: int
    cores: int
    threads: int
    kernel: str
    cgroup: int
    kvm: bool
    pins_stick: bool
    nri: bool
    installed: bool
    """The project was installed by its own `kata-pin install`."""
    results: str

    @classmethod
    def read(cls) -> Node:
        """Read the promises from the environment."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 10) -> None:
        """Wait until `condition()`; fail naming `what` after `seconds`, scaled."""
        limit = time.monotonic() + seconds * self.scale
        while not condition():
            assert time.monotonic() < limit, f"not in {seconds * self.scale:.0f} s: {what}"
            time.sleep(PAUSE_S * self.scale)

    def run(self, argv: Sequence[str], seconds: float = 30) -> str:
        """Run a command of the machine; return its output, fail with its errors."""
        done = subprocess.run(
            list(argv), capture_output=True, text=True, timeout=seconds * self.scale, check=False
        )
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def tell(self, text: str) -> None:
        """Note a line for whoever reads the results: `scripts/lab test` shows it at its end."""
        with (self.results_folder() / "told.txt").open("a") as file:
            file.write(f"{text}\n")

    def results_folder(self) -> Path:
        """Return the folder that is brought back to the host."""
        folder = Path(self.results)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
