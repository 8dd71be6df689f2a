"""A machine that lacks something is told exactly what, before anything starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lab import needs
from tests.lab.errors import LabError
from tests.lab.settings import LAB, PROJECT


def test_missing_commands_are_named_with_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every missing command is named at once, with the package to install."""
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    missing = needs.missing_to_build("trixie", tmp_path)
    assert "command debootstrap (package debootstrap)" in missing
    assert "command mkfs.ext4 (package e2fsprogs)" in missing
    assert "command qemu-system-x86_64 (package qemu-system-x86)" in needs.missing_to_boot(tmp_path)


def test_missing_root_and_disk_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root and with a full disk, both are said, with the place and the size."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))
    missing = needs.missing_to_build("trixie", tmp_path / "not" / "yet")
    assert any(line.startswith("root: ") for line in missing)
    assert any(f"GiB of disk at {tmp_path}, there are 1.0" in line for line in missing)


def test_requirements_end_the_command_with_a_list() -> None:
    """The error lists one item a line."""
    with pytest.raises(LabError, match=r"cannot build, this machine lacks:\n  - a\n  - b"):
        needs.require(["a", "b"], "build")
    needs.require([], "build")


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    """The real command with an empty PATH exits 1, names packages and leaves nothing behind."""
    done = subprocess.run(
        [sys.executable, str(PROJECT / "scripts/lab"), "build"],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path), "KATA_PIN_LAB_CACHE": f"{tmp_path}/c"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert "command unshare (package util-linux)" in done.stderr
    assert not (tmp_path / "c" / "base").exists()


@pytest.fixture
def anyones() -> Iterator[Path]:
    """A folder that nobody can read too; pytest's own are root's alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.mark.root
def test_nobody_on_a_full_disk_without_packages_is_told_all_of_it_at_once(anyones: Path) -> None:
    """The real command, for a user with nothing: each lack is a line, exit 1, no traceback."""
    cache = anyones / "cache"
    done = _lab_as_nobody(anyones, cache, "build", "trixie-smt")
    assert done.returncode == 1
    first, *lines = done.stderr.splitlines()
    assert first == "lab: cannot build a lab image, this machine lacks:"
    assert "  - root: debootstrap makes devices and changes its root" in lines
    assert "  - command unshare (package util-linux)" in lines
    assert any(line.startswith(f"  - 7 GiB of disk at {cache}, there are 0.0: ") for line in lines)
    assert all(line.startswith("  - ") for line in lines)


@pytest.mark.root
def test_what_tests_lack_is_told_before_anything_starts(anyones: Path) -> None:
    """`test`: what building, booting, testing and the results lack, in one list, each once."""
    done = _lab_as_nobody(anyones, anyones / "cache", "test", "trixie-smt")
    assert done.returncode == 1
    first, *lines = done.stderr.splitlines()
    assert first == "lab: cannot test in a lab machine, this machine lacks:"
    assert f"  - permission to write in {anyones}/clone" in lines
    for package in ("util-linux", "qemu-system-x86", "binutils"):
        assert [line for line in lines if line.endswith(f"(package {package})")]
    assert len(lines) == len(set(lines))


def _lab_as_nobody(folder: Path, cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/lab as nobody, with an empty PATH and a cache on a full disk."""
    clone = folder / "clone"
    shutil.copytree(LAB, clone / "tests/lab", ignore=shutil.ignore_patterns("__pycache__"))
    (clone / "scripts").mkdir()
    shutil.copy2(PROJECT / "scripts/lab", clone / "scripts/lab")
    for lock in ("requirements.lock", "requirements-dev.lock"):
        shutil.copy2(PROJECT / lock, clone)
    cache.mkdir()
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    command = [*nobody, "/usr/bin/env", f"PATH={folder}", f"KATA_PIN_LAB_CACHE={cache}/lab"]
    command += ["/usr/bin/python3", str(clone / "scripts/lab"), *words]
    script = 'mount -t tmpfs -o size=1m,mode=777 none "$1" && shift && exec "$@"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(cache), *command],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
