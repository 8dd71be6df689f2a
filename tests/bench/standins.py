"""Processes that look like idle VMs, where real ones are too many or cannot be had.

A copy of the Python interpreter called qemu-system-x86_64, with -name as QEMU has it and 20
sleeping threads beside the main one. They are found, believed, pinned and audited like VMs; KVM
knows nothing of them. `crowd` takes them only without KVM, and the rows say so.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.figures import BenchError
from tests.bench.node import BenchNode, accelerator
from tests.support.hooks import INTERPRETER
from tests.support.katalike import ContainerSpec
from tests.support.qemu import QEMU, Accelerator

_BODY = """
import _thread, sys
stop = _thread.allocate_lock()
stop.acquire()
_thread.stack_size(65536)
for _ in range(20):
    _thread.start_new_thread(stop.acquire, ())
sys.stdout.write("up\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def program(node: BenchNode) -> Path:
    """Return the executable of a node's stand-ins, which its daemon must be told to believe."""
    path = node.root / "qemu-system-x86_64"
    if not path.exists():
        shutil.copy(Path(INTERPRETER).resolve(), path)
    return path


def begin(executable: Path, name: str) -> subprocess.Popen[bytes]:
    """Start a stand-in for a sandbox's VMM; `wait_up` waits for its threads."""
    return subprocess.Popen(
        [str(executable), "-ISc", _BODY, "-name", f"sandbox-{name}", "-smp", "1"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def wait_up(process: subprocess.Popen[bytes]) -> None:
    """Wait until a stand-in has its threads."""
    assert process.stdout is not None
    if process.stdout.readline() != b"up\n":
        raise BenchError("a stand-in did not start")


def write_state(node: BenchNode, name: str, pid: int, containers: Sequence[ContainerSpec]) -> None:
    """Write what Kata keeps of a sandbox, in place as Kata does."""
    folder = node.dirs.vc / "sbs" / name
    folder.mkdir(exist_ok=True)
    entries = [one.entry(name, node.dirs.bundles / one.id) for one in containers]
    document = {
        "State": "running",
        "SandboxContainer": name,
        "HypervisorState": {"Type": "qemu", "Pid": pid},
        "Config": {"HypervisorType": "qemu", "ContainerConfigs": entries},
    }
    (folder / "persist.json").write_text(json.dumps(document))


class StandIns:
    """Processes that look like idle VMs, with the state that Kata keeps of them."""

    def __init__(self, node: BenchNode) -> None:
        self._node = node
        self.executable = program(node)
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        """The pids of those that run, in the order of their sandboxes."""
        return [process.pid for process in self._processes]

    def grow(self, count: int) -> list[str]:
        """Start processes until there are so many; return the ids of their sandboxes."""
        first = len(self._processes)
        self.start(count)
        return [_name(number) for number in range(first)] + self.announce(first, count)

    def start(self, count: int) -> None:
        """Start processes until there are so many: nothing confirms that they are VMs yet."""
        fresh = [begin(self.executable, _name(n)) for n in range(len(self._processes), count)]
        self._processes += fresh
        for process in fresh:
            wait_up(process)

    def announce(self, first: int, end: int) -> list[str]:
        """Write what Kata keeps of these sandboxes, by number; return their ids."""
        ids = [_name(number) for number in range(first, end)]
        for name, process in zip(ids, self._processes[first:end], strict=True):
            write_state(self._node, name, process.pid, self._node.specs(name))
        return ids

    def end(self, first: int) -> None:
        """End those from a number on, with what Kata keeps of them."""
        for number, process in enumerate(self._processes[first:], start=first):
            process.kill()
            process.communicate()
            shutil.rmtree(self._node.dirs.vc / "sbs" / _name(number))
        del self._processes[first:]

    def close(self) -> None:
        """End them all."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


def _name(number: int) -> str:
    return f"standin{number:04d}"


@dataclass(frozen=True)
class Crowd:
    """Many sandboxes: their ids, what they are, and executables that the daemon must believe."""

    ids: list[str]
    what: str
    hypervisors: tuple[str, ...] = (QEMU,)


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
