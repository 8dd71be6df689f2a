"""The release of a Linux kernel image.

A guest's kernel is a file on the host (QEMU's -kernel), so its release is known without asking the
guest. Two forms: bzImage, whose header points to the text (Documentation/arch/x86/boot.rst,
kernel_version), and vmlinux, an ELF file with the banner `Linux version <release>` somewhere in it.
Out of scope: reading the file (host/kernel_image.py), and whether the guest still runs it (kexec).
"""

from __future__ import annotations

import re
import struct
from typing import Final

from kata_pin.errors import ParseError

HEAD: Final = 64 * 1024
"""Bytes to read from the start of a bzImage: the setup code is 32 KiB at most."""

BANNER: Final = 128
"""Bytes by which the pieces of a vmlinux must overlap, so that `find_banner` misses nothing."""

_MAGIC: Final = 0x202
_VERSION: Final = 0x20E
_SECTOR: Final = 0x200
_RELEASE: Final = re.compile(rb"[0-9]+\.[0-9]+[0-9A-Za-z._+~-]{0,100}")
_BANNER: Final = re.compile(rb"Linux version (" + _RELEASE.pattern + rb") ")


def is_vmlinux(head: bytes) -> bool:
    """Return whether an image is an ELF file, to be searched with `find_banner`."""
    return head.startswith(b"\x7fELF")


def parse_release(head: bytes) -> str:
    """Read the release, such as `6.12.47`, from the first HEAD bytes of a bzImage; ParseError."""
    if head[_MAGIC : _MAGIC + 4] != b"HdrS" or len(head) < _VERSION + 2:
        raise ParseError("not a bzImage", source="kernel image")
    (offset,) = struct.unpack_from("<H", head, _VERSION)
    match = _RELEASE.match(head, _SECTOR + offset)
    if match is None:
        raise ParseError("a bzImage without a release", source="kernel image")
    return match[0].decode("ascii")


def find_banner(piece: bytes) -> str:
    """Return the release in a piece of a vmlinux, empty if there is none."""
    match = _BANNER.search(piece)
    return match[1].decode("ascii") if match else ""
