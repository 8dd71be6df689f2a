"""How the cost of audits grows from 10 to 1,000 sandboxes.

A thousand VMs would take 16 GiB, so their place is taken by processes that only look like them: a
copy of the Python interpreter called qemu-system-x86_64, with QEMU's -name and 19 sleeping threads
beside the main one. They are found, believed, pinned and audited like VMs (without KVM there is
nothing to learn of vCPUs); timed is what audits.py times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tests.bench.audits import Figures, cpu_row, take
from tests.bench.figures import BenchError, Row
from tests.bench.node import BenchNode
from tests.bench.service import local_service
from tests.support.hooks import INTERPRETER

SIZES = (10, 100, 1000)

LINEAR = 1.5
"""Most that an audit's cost for one sandbox may grow, against that of a bare loop."""

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


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield audits at each size; the last rows compare the cost for one sandbox with the first."""
    with contextlib.closing(StandIns(node)) as stand_ins:
        figures = {size: asyncio.run(_at(node, stand_ins, size, rounds)) for size in SIZES}
    for size, taken in figures.items():
        what = f"{size} stand-ins, {taken.threads} threads"
        for name, floor in (("affinity", "bare"), ("deep", "bare stat"), ("round", "bare stat")):
            yield cpu_row(f"{_TITLES[name]}, {what}", taken.of(name), taken.of(floor))
    for name, floor in (("affinity", "bare"), ("deep", "bare stat")):
        grown, least = _growth(figures, name), _growth(figures, floor)
        yield Row(
            f"{_TITLES[name]}, one sandbox of 1,000 against one of 10", grown, "x", rounds,
            floor=least, ratio=grown / least, bar=LINEAR,
            detail=f"a bare loop's cost grows {least:.2f} x too",
        )  # fmt: skip


def _growth(figures: Mapping[int, Figures], name: str) -> float:
    """Return how much more the same takes for one sandbox of the most than of the fewest."""
    first, last = (figures[size].of(name).median / size for size in (SIZES[0], SIZES[-1]))
    return last / first


_TITLES = {
    "affinity": "affinity audit",
    "deep": "deep audit",
    "round": "deep round with adoption",
}


async def _at(node: BenchNode, stand_ins: StandIns, size: int, rounds: int) -> Figures:
    ids = stand_ins.grow(size)
    config = replace(node.config(audits=False), hypervisors=(str(stand_ins.executable),))
    async with local_service(config) as daemon:
        await daemon.settle(ids)
        return await take(daemon, ids, rounds)
