"""The ramdisk: modules in the order in which they can be loaded, and a well-formed archive."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from tests.lab import ramdisk
from tests.lab.errors import LabError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A Debian tree with a kernel whose ext4 needs two other modules."""
    folder = tmp_path / "lib/modules/6.0"
    (folder / "kernel").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/busybox").write_bytes(b"busybox")
    for name in ("ext4", "jbd2", "crc16", "virtio_blk", "crc32c_generic"):
        (folder / f"kernel/{name}.ko.xz").write_bytes(lzma.compress(name.encode()))
    (folder / "modules.builtin").write_text("kernel/drivers/virtio/virtio_pci.ko\n")
    (folder / "modules.dep").write_text(
        "kernel/ext4.ko.xz: kernel/jbd2.ko.xz kernel/crc16.ko.xz\n"
        "kernel/jbd2.ko.xz: kernel/crc16.ko.xz\n"
        "kernel/crc16.ko.xz:\nkernel/virtio_blk.ko.xz:\nkernel/crc32c_generic.ko.xz:\n"
    )
    return tmp_path


def _entries(archive: bytes) -> dict[str, bytes]:
    """Read a newc archive back: name and content of each entry."""
    entries: dict[str, bytes] = {}
    place = 0
    while True:
        header = archive[place : place + 110]
        assert header[:6] == b"070701"
        fields = [int(header[6 + 8 * number : 14 + 8 * number], 16) for number in range(13)]
        size, name_size = fields[6], fields[11]
        name = archive[place + 110 : place + 110 + name_size - 1].decode()
        place += -(-(110 + name_size) // 4) * 4
        if name == "TRAILER!!!":
            return entries
        entries[name] = archive[place : place + size]
        place += -(-size // 4) * 4


def test_a_module_comes_after_what_it_needs(tree: Path) -> None:
    """Built-in modules are left out; the others come in loading order, unpacked, each once."""
    target = tree / "initrd.img"
    ramdisk.build(tree, "6.0", target)
    entries = _entries(target.read_bytes())
    names = ["virtio_blk", "crc32c_generic", "crc16", "jbd2", "ext4"]
    loaded = sorted(name for name in entries if name.startswith("modules/"))
    assert loaded == [f"modules/{number:02}-{name}.ko" for number, name in enumerate(names)]
    assert entries["modules/04-ext4.ko"] == b"ext4"
    assert entries["init"].startswith(b"#!/bin/busybox sh")
    assert entries["bin/busybox"] == b"busybox"


def test_a_kernel_without_a_module_is_named(tree: Path) -> None:
    """A release that lacks a module fails at build time, not in a machine that does not boot."""
    with pytest.raises(LabError, match="no module nosuch"):
        ramdisk.modules(tree / "lib/modules/6.0", ("nosuch",))
