"""A kernel's release, from its image."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.guest.probe import HEAD, find_banner, is_vmlinux, parse_release


def _image(version: bytes, offset: int = 0x3000) -> bytes:
    head = bytearray(HEAD)
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", head, 0x20E, offset)
    head[0x200 + offset : 0x200 + offset + len(version)] = version
    return bytes(head)


def test_releases() -> None:
    """The release that uname -r shows in the guest, without the rest of the text."""
    debian = _image(b"6.12.107+deb13-amd64 (debian-kernel@lists.debian.org) #1 SMP\0")
    assert parse_release(debian) == "6.12.107+deb13-amd64"
    assert parse_release(_image(b"6.18.35\0")) == "6.18.35"


def test_images_of_this_machine() -> None:
    """Kernels that are installed here are named by the file that holds them."""
    images = sorted(Path("/boot").glob("vmlinuz-*"))
    if not images:
        pytest.skip("no kernel in /boot")
    for image in images:
        with image.open("rb") as file:
            assert parse_release(file.read(HEAD)) == image.name.removeprefix("vmlinuz-")


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\x7fELF",
        _image(b"6.1\0")[:0x20F],
        _image(b"6.1\0", offset=0),
        _image(b"6.1\0", offset=0xFFFF),
        _image(b"Linux\0"),
        _image(b"6.\xff\0"),
    ],
)
def test_what_names_no_release(head: bytes) -> None:
    """Another file, a short one, a pointer to nowhere or to other text."""
    with pytest.raises(ParseError):
        parse_release(head)


def test_a_vmlinux() -> None:
    """An ELF file is searched for its banner."""
    assert is_vmlinux(b"\x7fELF\x02\x01")
    assert not is_vmlinux(_image(b"6.1\0"))
    banner = b"\0Linux version 6.12.47 (kata@build) (gcc 12) #1 SMP\n\0"
    assert find_banner(bytes(1000) + banner + bytes(1000)) == "6.12.47"
    assert find_banner(b"Linux version %s (x)" % (b"9" * 5000)) == ""
    assert find_banner(b"Linux version %s") == ""
