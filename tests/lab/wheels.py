"""Wheels for the guest: what the lock files name, for the guest's Python, fetched on the host.

The guest has no network. Hashes are checked twice: by pip when fetching, and by pip again when it
installs into the image.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.lab import process
from tests.lab.errors import LabError
from tests.lab.flavours import Suite
from tests.lab.settings import PROJECT

LOCKS: Final = (PROJECT / "requirements.lock", PROJECT / "requirements-dev.lock")

HOST_ONLY: Final = frozenset(
    # Checkers run on the host only, and the random order of tests is no help where a run is long.
    {"mypy", "mypy-extensions", "ruff", "pytest-randomly", "types-pyyaml", "types-psutil"}
    # The guest's tests run in one process, where each plugin costs seconds to import.
    | {"pytest-xdist", "execnet"}
    # Parts of mypy alone.
    | {"ast-serialize", "librt", "pathspec"}
    # Other systems.
    | {"colorama", "win-inet-pton"}
)

_PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def guest_lock() -> str:
    """Return the part of the lock files that the guest gets, hashes included, each name once."""
    kept: list[str] = []
    seen: set[str] = set()
    wanted = False
    for line in (line for lock in LOCKS for line in lock.read_text().splitlines()):
        if line and not line[0].isspace() and not line.startswith("#"):
            name = line.partition("==")[0].strip().lower()
            wanted = name not in HOST_ONLY | seen
            seen.add(name)
        if wanted and not line.lstrip().startswith("#"):
            kept.append(line)
    return "\n".join(kept) + "\n"


def python_with_pip() -> str:
    """Return an interpreter that has pip: the project's own if there is one."""
    candidates = [str(PROJECT / ".venv/bin/python"), sys.executable, shutil.which("python3") or ""]
    for python in candidates:
        if python and Path(python).exists() and _has_module(python, "pip"):
            return python
    raise LabError("no python with pip (package python3-pip, or make .venv)")


def _has_module(python: str, module: str) -> bool:
    answer = subprocess.run(
        [python, "-c", f"import {module}"], capture_output=True, check=False, timeout=60
    )
    return answer.returncode == 0


def fetch(suite: Suite, cache: Path, log: Path, *, deadline_s: float) -> Path:
    """Return a folder with `lock.txt` and its wheels for the Python of `suite`.

    Fetched once for each content of the lock files; an interrupted fetch goes on where it was.
    """
    lock = guest_lock()
    key = hashlib.sha256(f"{suite.python}\n{lock}".encode()).hexdigest()[:12]
    folder = cache / "wheels" / f"{suite.name}-{key}"
    if folder.exists():
        return folder
    part = folder.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    (part / "lock.txt").write_text(lock)
    pip = [python_with_pip(), "-m", "pip", "--disable-pip-version-check", "download"]
    pip += ["--no-deps", "--require-hashes", "--only-binary=:all:", "--progress-bar=off"]
    pip += ["--implementation=cp", f"--python-version={suite.python}"]
    pip += [f"--platform={platform}" for platform in _PLATFORMS]
    # pip 23 wants every ABI named: the version's own, the stable one, and none.
    abi = f"cp{suite.python.replace('.', '')}"
    pip += [f"--abi={abi}", "--abi=abi3", "--abi=none"]
    pip += [f"--dest={part}", "-r", str(part / "lock.txt")]
    process.run(pip, deadline_s=deadline_s, log=log)
    part.rename(folder)
    return folder


def project_wheel(folder: Path, log: Path, *, deadline_s: float) -> Path:
    """Build the project's wheel in `folder` from a copy of the tree; return its path.

    A copy, because setuptools writes into the tree that it builds.
    """
    copy = folder / "source"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("kata_pin", "hooks"):
        if (PROJECT / name).is_dir():
            shutil.copytree(PROJECT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "setup.py"):
        if (PROJECT / name).is_file():
            shutil.copy2(PROJECT / name, copy / name)
    (copy / "README.md").touch()
    pip = [python_with_pip(), "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    pip += [f"--wheel-dir={folder}", str(copy)]
    env = {**os.environ, "PIP_NO_INPUT": "1"}
    process.run(pip, deadline_s=deadline_s, log=log, env=env)
    shutil.rmtree(copy)
    wheels = sorted(folder.glob("kata_pin-*.whl"))
    if len(wheels) != 1:
        raise LabError(f"expected one wheel of the project in {folder}, found {len(wheels)}")
    return wheels[0]
