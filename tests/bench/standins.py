"""Processes that look like idle VMs, where real ones are too many or cannot be had.

A copy of the Python interpreter called qemu-system-x86_64, with -name as QEMU has it and 19
sleeping threads beside the main one. They are found, believed, pinned and audited like VMs; KVM
knows nothing of them. `crowd` takes them only without KVM, and the rows say so.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.figures import BenchError
from tests.bench.node import BenchNode, accelerator
from tests.support.hooks import INTERPRETER
from tests.support.qemu import Accelerator

_BODY = """
import _thread, sys
stop = _thread.allocate_lock()
stop.acquire()
_thread.stack_size(65536)
for _ in range(19):
    _thread.start_new_thread(stop.acquire, ())
sys.stdout.write("up\\n")
sys.stdout.flush()
sys.stdin.read()
"""


class StandIns:
    """Processes that look like idle VMs, with the state that Kata keeps of them."""

    def __init__(self, node: BenchNode) -> None:
        self._node = node
        self.executable = node.root / "qemu-system-x86_64"
        shutil.copy(Path(INTERPRETER).resolve(), self.executable)
        self._processes: list[subprocess.Popen[bytes]] = []

    def grow(self, count: int) -> list[str]:
        """Start processes until there are so many; return the ids of their sandboxes."""
        fresh = [self._start(number) for number in range(len(self._processes), count)]
        for process in fresh:
            assert process.stdout is not None
            if process.stdout.readline() != b"up\n":
                raise BenchError("a stand-in did not start")
        return [_name(number) for number in range(count)]

    def close(self) -> None:
        """End them all."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        name = _name(number)
        process = subprocess.Popen(
            [str(self.executable), "-ISc", _BODY, "-name", f"sandbox-{name}", "-smp", "1"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._processes.append(process)
        folder = self._node.dirs.vc / "sbs" / name
        folder.mkdir()
        containers = [
            one.entry(name, self._node.dirs.bundles / one.id) for one in self._node.specs(name)
        ]
        document = {
            "State": "running",
            "SandboxContainer": name,
            "HypervisorState": {"Type": "qemu", "Pid": process.pid},
            "Config": {"HypervisorType": "qemu", "ContainerConfigs": containers},
        }
        (folder / "persist.json").write_text(json.dumps(document))
        return process


def _name(number: int) -> str:
    return f"standin{number:04d}"


@dataclass(frozen=True)
class Crowd:
    """Many sandboxes: their ids, what they are, and executables that the daemon must believe."""

    ids: list[str]
    what: str
    hypervisors: tuple[str, ...] = ()


@contextlib.contextmanager
def crowd(node: BenchNode, count: int) -> Iterator[Crowd]:
    """Start so many idle VMs, or stand-ins where there is no KVM; the node ends the VMs."""
    if accelerator() is Accelerator.KVM:
        node.start(count)
        yield Crowd([one.id for one in node.sandboxes], f"{count} sandboxes")
        return
    with contextlib.closing(StandIns(node)) as stand_ins:
        ids = stand_ins.grow(count)
        yield Crowd(ids, f"{count} stand-ins, no KVM", (str(stand_ins.executable),))
