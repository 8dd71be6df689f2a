"""The release of a guest's kernel, from the file that the VMM's command line names."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import pytest

from kata_pin.base.errors import HostError, ParseError
from kata_pin.base.sandbox import ProcessKey
from kata_pin.guest.probe import PIECE, read_release
from kata_pin.linux.files import HOST

LATER = ProcessKey(1, int((time.clock_gettime(time.CLOCK_BOOTTIME) + 3600) * 100))
"""A VMM that starts after every file of these tests was written."""

EARLIER = ProcessKey(1, 0)


def bzimage(path: Path, text: bytes) -> str:
    """Write the head of a bzImage that says a release."""
    image = bytearray(4096)
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", image, 0x20E, 0x400)
    image[0x600 : 0x600 + len(text)] = text
    path.write_bytes(image)
    return str(path)


def test_bzimage(tmp_path: Path) -> None:
    """The header says it; a link to the image is followed."""
    bzimage(tmp_path / "vmlinuz", b"6.12.47 (kata@build) #1 SMP\0")
    (tmp_path / "vmlinuz.container").symlink_to("vmlinuz")
    assert read_release(HOST, str(tmp_path / "vmlinuz.container"), LATER) == "6.12.47"


@pytest.mark.parametrize("at", [0, 5000, 64 * 1024 - 7, 64 * 1024 + PIECE - 20])
def test_vmlinux(tmp_path: Path, at: int) -> None:
    """The banner is found wherever it stands, also across two pieces."""
    image = tmp_path / "vmlinux"
    image.write_bytes(b"\x7fELF" + b"\0" * at + b"Linux version 6.18.35 (gcc)" + b"\0" * PIECE)
    assert read_release(HOST, str(image), LATER) == "6.18.35"


def test_image_that_was_changed_says_nothing(tmp_path: Path) -> None:
    """An upgrade of Kata under a running VM must not change what is known of that VM."""
    path = bzimage(tmp_path / "vmlinuz", b"6.12.47 \0")
    with pytest.raises(ParseError, match="changed since"):
        read_release(HOST, path, EARLIER)


def test_what_is_no_image(tmp_path: Path) -> None:
    """Nothing but a regular file is opened; one that does not say is an error."""
    os.mkfifo(tmp_path / "fifo")
    for path in (str(tmp_path / "fifo"), str(tmp_path), "/dev/zero", "relative"):
        with pytest.raises(ParseError):
            read_release(HOST, path, LATER)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "elf").write_bytes(b"\x7fELF" + b"\0" * 100)
    for name in ("text", "elf"):
        with pytest.raises(ParseError):
            read_release(HOST, str(tmp_path / name), LATER)
    with pytest.raises(HostError, match="No such file"):
        read_release(HOST, str(tmp_path / "absent"), LATER)


def test_a_link_that_was_changed_says_nothing(tmp_path: Path) -> None:
    """Kata's configuration names a link: an upgrade leaves the old image where it was."""
    image = bzimage(tmp_path / "vmlinuz", b"6.12.47 \0")
    time.sleep(0.05)  # file times are those of the last tick
    started = ProcessKey(1, int(time.clock_gettime(time.CLOCK_BOOTTIME) * 100))
    time.sleep(0.05)
    (tmp_path / "vmlinuz.container").symlink_to("vmlinuz")
    assert read_release(HOST, image, started) == "6.12.47"
    with pytest.raises(ParseError, match="changed since"):
        read_release(HOST, str(tmp_path / "vmlinuz.container"), started)
