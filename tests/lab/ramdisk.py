"""The initial ramdisk of a lab machine: the few modules that find its disk, and nothing else.

Debian's own starts udev for all devices, which costs fifteen seconds when sixteen CPUs are emulated
on two. This one is a cpio archive in the `newc` form (kernel: driver-api/early-userspace/
buffer-format) with busybox, the modules uncompressed in loading order, and an init of ten lines.
"""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Final

from tests.lab.errors import LabError

MODULES: Final = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")
"""What stands between the kernel and /dev/vda; built-in ones are left out."""

_INIT: Final = """\
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in /modules/*; do /bin/busybox insmod "$module"; done
tries=0
while [ ! -b /dev/vda ] && [ $tries -lt 100 ]; do
    /bin/busybox sleep 0.1
    tries=$((tries + 1))
done
/bin/busybox mount -t ext4 -o noatime /dev/vda /root || exit 1
/bin/busybox umount /dev
exec /bin/busybox switch_root /root /sbin/init
"""

_FOLDER: Final = 0o040755
_PROGRAM: Final = 0o100755
_FILE: Final = 0o100644


def build(tree: Path, release: str, target: Path) -> None:
    """Write the ramdisk for kernel `release` of the Debian tree `tree` to `target`."""
    archive = Archive()
    for folder in ("bin", "dev", "modules", "root"):
        archive.add(folder, _FOLDER)
    archive.add("bin/busybox", _PROGRAM, (tree / "bin/busybox").read_bytes())
    archive.add("init", _PROGRAM, _INIT.encode())
    for number, file in enumerate(modules(tree / "lib/modules" / release, MODULES)):
        name = f"modules/{number:02}-{file.name.partition('.')[0]}.ko"
        archive.add(name, _FILE, _module(file))
    target.write_bytes(archive.finish())


def modules(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """Return the files of the modules `names` and of what they need, in loading order.

    Read from depmod's modules.dep and modules.builtin below `folder`.
    """
    built_in = {_stem(line) for line in (folder / "modules.builtin").read_text().splitlines()}
    needs: dict[str, list[str]] = {}
    files: dict[str, str] = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        file, _, rest = line.partition(":")
        files[_stem(file)] = file
        # modules.dep lists what is needed in the order of unloading.
        needs[_stem(file)] = [_stem(word) for word in reversed(rest.split())]
    order: list[str] = []
    for name in names:
        if name in built_in:
            continue
        if name not in files:
            raise LabError(f"the kernel in {folder} has no module {name}")
        order += [module for module in (*needs[name], name) if module not in order]
    return [folder / files[name] for name in order]


def _stem(path: str) -> str:
    return Path(path).name.partition(".")[0].replace("-", "_")


def _module(file: Path) -> bytes:
    """Return the module itself, which Debian 13 ships compressed."""
    data = file.read_bytes()
    return lzma.decompress(data) if file.suffix == ".xz" else data


class Archive:
    """A cpio archive in the form that the kernel reads."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._inode = 0

    def add(self, name: str, mode: int, data: bytes = b"") -> None:
        """Append a file or folder owned by root."""
        self._inode += 1
        fields = (self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        self._parts += [_padded(header + name.encode() + b"\0"), _padded(data)]

    def finish(self) -> bytes:
        """Return the whole archive."""
        self.add("TRAILER!!!", 0)
        return b"".join(self._parts)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
