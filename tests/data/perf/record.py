"""Records the rings of this folder on CPU 1; run as root: python tests/data/perf/record.py."""

import mmap
import os
import struct
import time
from fcntl import ioctl
from pathlib import Path

from kata_pin.rights.broker.libc import open_switches

SIZE = 2 * mmap.PAGESIZE
HEAD, TAIL = 1024, 1032


def record(name: str, *, drained: bool) -> None:
    """Write what a small ring holds once it is full."""
    fd = open_switches(1)
    ring = mmap.mmap(fd, mmap.PAGESIZE + SIZE)
    ioctl(fd, 0x2400, 0)
    for _ in range(20 if drained else 1):
        time.sleep(0.01 if drained else 0.5)
        (head,) = struct.unpack_from("@Q", ring, HEAD)
        struct.pack_into("@Q", ring, TAIL, head)
    time.sleep(0.5)
    ioctl(fd, 0x2401, 0)
    Path(__file__).with_name(f"{name}.ring").write_bytes(ring[:])
    os.close(fd)


if __name__ == "__main__":
    record("wrapped", drained=True)
    record("lost", drained=False)
