"""On what the figures were taken."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from tests.bench import node
from tests.support.hooks import INTERPRETER


def described() -> str:
    """Return the lines that say so: machine, kernel, accelerator, interpreters, load."""
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return "\n".join(
        [
            f"machine      {platform.node()}, {os.cpu_count()} CPUs ({_model()}), {_memory_gib()}",
            f"kernel       {platform.release()}, {_cgroups()}",
            f"accelerator  {node.accelerator()}",
            f"python       {_version(sys.executable)}; hook {_version(INTERPRETER)}",
            f"load         {load}",
        ]
    )


def _model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{pages / 2**30:.0f} GiB"


def _cgroups() -> str:
    return "cgroup v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "cgroup v1"


def _version(interpreter: str) -> str:
    done = subprocess.run([interpreter, "-V"], capture_output=True, text=True, check=True)
    return f"{done.stdout.split()[-1]} ({interpreter})"
