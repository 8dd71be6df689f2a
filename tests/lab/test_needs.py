"""A machine that lacks something is told exactly what, before anything starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lab import needs
from tests.lab.errors import LabError
from tests.lab.settings import PROJECT


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
