"""A Debian root that a test may change: a file system over the one of scripts/debian-root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.packages.parts import NOT_HERE
from tests.lab.rootfs import root_builder

ROOT = Path(__file__).resolve().parents[2]

_OVER = r"""
set -e
mount -t tmpfs tmpfs "$2"
mkdir "$2/upper" "$2/work" "$2/mnt"
mount -t overlay overlay -o lowerdir="$1",upperdir="$2/upper",workdir="$2/work" "$2/mnt"
top=$2 script=$3
shift 3
cp "$@" "$top/mnt/tmp/"
root=$top/mnt
eval "$script"
"""

DOUBLES = r"""
mkdir -p /run/systemd/system /tmp/double
for one in systemctl deb-systemd-invoke kata-pin systemd-tmpfiles; do
    printf '#!/bin/sh\necho "%s $*" >> /tmp/calls\n' "$one" > "/tmp/double/$one"
    chmod +x "/tmp/double/$one"
done
"""
"""A system that is up, for a package's scripts, where /tmp/double is first in PATH: what they call
is written to /tmp/calls."""

LIST = r"""
list() {
    find / -xdev \( -path /tmp -o -path /var/lib/dpkg -o -path /var/lib/rpm -o -path /var/log \
        -o -path /var/cache \) -prune -o -print |
        grep -vE '^/etc/(passwd|group|g?shadow)-?$' | sort
}
"""


def package(script: str, *options: str, folder: Path) -> Path:
    """Build a package of the files as they are; skip the test where the machine cannot."""
    done = subprocess.run(
        [str(ROOT / "scripts" / script), "--folder", str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VENV": sys.prefix},
    )
    if done.returncode == NOT_HERE:
        pytest.skip(done.stderr)  # scripts/test says so too, for the image
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def run(script: str, *files: Path, folder: Path) -> list[str]:
    """Run a shell script with `$root` and copies of files in its /tmp; return what it printed."""
    root = root_builder(lambda _: None).find_root()
    if root is None:
        pytest.skip("no Debian 13 root: scripts/debian-root builds one (once, some minutes)")
    words = [str(root), str(folder), script, *map(str, files)]
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", _OVER, "sh", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
