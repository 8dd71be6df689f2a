"""Files into and out of a machine: tar on both sides of the channel."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.lab import process
from tests.lab.channel import Channel, Finished
from tests.lab.errors import LabError


def put(channel: Channel, sources: Sequence[str], folder: str, *, deadline_s: float) -> None:
    """Copy files and folders from here into `folder` of the machine, which is made if missing."""
    packer = ["tar", "--create", "--exclude=__pycache__"]
    for source in sources:
        path = Path(source).absolute()
        if not path.exists():
            raise LabError(f"{source}: no such file or folder")
        packer += ["-C", str(path.parent), path.name]
    script = 'mkdir -p -- "$1" && exec tar --extract --no-same-owner -C "$1"'
    with subprocess.Popen(packer, stdout=subprocess.PIPE, start_new_session=True) as tar:
        assert tar.stdout is not None
        try:
            done = channel.run(
                ["sh", "-c", script, "sh", folder], stdin=tar.stdout, deadline_s=deadline_s
            )
        finally:
            tar.stdout.close()
            process.end_group(tar)
    _check(done, tar, f"put into {folder}")


def get(channel: Channel, sources: Sequence[str], folder: str, *, deadline_s: float) -> None:
    """Copy files and folders of the machine into `folder` here, which is made if missing."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    packer = ["tar", "--create"]
    for source in sources:
        path = Path(source)
        if not path.is_absolute():
            raise LabError(f"{source}: name files of the machine by absolute paths")
        packer += ["-C", str(path.parent), path.name]
    unpacker = ["tar", "--extract", "--no-same-owner", "-C", folder]
    with subprocess.Popen(unpacker, stdin=subprocess.PIPE, start_new_session=True) as tar:
        assert tar.stdin is not None
        try:
            done = channel.run(packer, stdout=tar.stdin.write, deadline_s=deadline_s)
            tar.stdin.close()
            tar.wait(timeout=deadline_s)
        finally:
            process.end_group(tar)
    _check(done, tar, f"get from {', '.join(sources)}")


def _check(done: Finished, tar: subprocess.Popen[bytes], what: str) -> None:
    if done.code != 0:
        raise LabError(f"{what} failed: {done.stderr.decode(errors='replace').strip()}")
    if tar.returncode != 0:
        raise LabError(f"{what} failed: tar ended with {tar.returncode}")
