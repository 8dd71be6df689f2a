"""A QEMU without an operating system: its vCPUs halt at once and cost nothing.

Stands in for a sandbox's VM until the tests have their own Kata; the threads are the real ones.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.e2e.node import Node

VCPUS: Final = 4
_ROM_SIZE: Final = 64 * 1024
_RESET: Final = 0xFFF0
"""Where the first vCPU begins, in the last 64 KiB below 4 GiB."""

_HALT: Final = bytes.fromhex("fa f4 eb fd")  # cli; 1: hlt; jmp 1b


def halting_rom() -> bytes:
    """Return a firmware that halts: `cli; hlt; jmp` at the reset vector."""
    rom = bytearray(_ROM_SIZE)
    rom[_RESET : _RESET + len(_HALT)] = _HALT
    return bytes(rom)


@contextlib.contextmanager
def idle_vm(node: Node, *more: str) -> Iterator[int]:
    """Run a KVM guest that halts; yield the pid of its QEMU once its vCPUs entered the guest."""
    with tempfile.TemporaryDirectory() as folder:
        rom = Path(folder) / "halt.rom"
        rom.write_bytes(halting_rom())
        child = subprocess.Popen(
            [
                *("qemu-system-x86_64", "-machine", "q35,accel=kvm", "-cpu", "host"),
                *("-smp", str(VCPUS), "-m", "64", "-nodefaults", "-no-user-config", "-nographic"),
                *("-bios", str(rom), *more),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            node.wait(
                lambda: child.poll() is not None or len(vcpu_tids(child.pid)) == VCPUS,
                "vCPU threads of the idle VM in debugfs",
                seconds=60,
            )
            if child.poll() is not None and child.stdout is not None:
                raise AssertionError(child.stdout.read().decode())
            yield child.pid
        finally:
            child.kill()
            child.communicate()


def vcpu_tids(pid: int) -> dict[int, int]:
    """Return KVM's vCPU ids and threads of a QEMU, from debugfs; a vCPU that never ran has none."""
    found = {}
    for folder in Path("/sys/kernel/debug/kvm").glob(f"{pid}-*/vcpu*"):
        with contextlib.suppress(FileNotFoundError):
            tid = int((folder / "pid").read_text())
            if tid:
                found[int(folder.name.removeprefix("vcpu"))] = tid
    return found


def tids(pid: int) -> set[int]:
    """Return the threads of a process."""
    return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
