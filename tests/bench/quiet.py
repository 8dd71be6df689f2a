"""What an audit of quiet pCPUs costs: 500 interrupts on 64 pCPUs, of which a pod has four.

A generated tree of /proc and /sys stands for the node, so what the kernel takes to print these
files is not in the figures. The floor opens and reads each file that an audit needs once, and looks
at nothing. CPU time, not elapsed time: the machine may be busy.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import EPERM
from pathlib import Path

from msgspec.structs import replace

from kata_pin.base.values import QuietLevel
from tests.bench.figures import MS, BenchError, Row, Samples, in_turns
from tests.bench.node import BenchNode
from tests.support import world
from tests.support.irqtree import Line
from tests.support.quietnode import QuietNode
from tests.support.worktree import WorkTree

CPUS, INTERRUPTS, MOVABLE = 64, 500, 200
THREADS, DEVICES = 1000, 250
POD = "4-7"
BAR_MS = 5.0


class Node(QuietNode):
    """A node that has the files of `full` too."""

    tree: WorkTree


def measure(_: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield an audit of `irq` by how many interrupts fired since the last, and those of `full`."""
    with _node() as node:
        node.set_level(QuietLevel.IRQ)
        for share, bar in ((0, None), (3, BAR_MS), (10, BAR_MS)):
            name = f"audit of {INTERRUPTS} interrupts, {10 * share} % fired"
            yield _row(name, node, rounds, share, bar)
    with _node() as node:
        node.set_level(QuietLevel.FULL)
        yield _row("quiet: full, audit between two looks", node, rounds, 3, BAR_MS)
        deep = replace(node.live.now.audit, affinity_s=0.0, deep_s=0.0)
        node.live.replace(replace(node.live.now, audit=deep))
        name = f"quiet: full, look at {THREADS} kernel threads and {2 * DEVICES} queues"
        yield _row(name, node, rounds, 3, None)


def _row(name: str, node: Node, rounds: int, share: int, bar: float | None) -> Row:
    loop = asyncio.new_event_loop()
    try:
        for _ in range(4):  # what is due is done, and read back
            loop.run_until_complete(node.keeper.round())
        written = len(node.tree.writes)

        def audit() -> None:
            loop.run_until_complete(node.keeper.round())

        floor, audits = in_turns(
            rounds,
            lambda: _cpu(node, share, lambda: _read(node.tree)),
            lambda: _cpu(node, share, audit),
        )
    finally:
        loop.close()
    if len(node.tree.writes) != written:
        raise BenchError("an audit wrote something although nothing changed")
    if str(node.keeper.status.state.quiet) != POD:
        raise BenchError("the pod's pCPUs are not quiet")
    return _made(name, audits, floor, bar)


def _made(name: str, audits: Samples, floor: Samples, bar: float | None) -> Row:
    return Row(
        name, audits.median * MS, "ms CPU", len(audits.seconds), floor=floor.median * MS,
        ratio=audits.median / floor.median, bar=bar, bar_on_ratio=False, detail=audits.spread,
    )  # fmt: skip


def _cpu(node: Node, share: int, work: Callable[[], object]) -> float:
    """Return the CPU seconds of something after these tenths of all interrupts have fired."""
    for number, line in node.tree.lines.items():
        if number % 10 < share:
            line.counts[number % CPUS] += 3
    node.tree.render()
    start = time.process_time()
    work()
    return time.process_time() - start


def _read(tree: WorkTree) -> None:
    """Read every file of interrupts once."""
    for path in (
        tree.host.proc("interrupts"),
        tree.host.proc("irq", "default_smp_affinity"),
        *(tree.host.proc("irq", number, "smp_affinity_list") for number in tree.lines),
    ):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.read(fd, 4 * 1024 * 1024)
        os.close(fd)


@contextmanager
def _node() -> Iterator[Node]:
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        tree = WorkTree(Path(folder) / "tree", CPUS)
        tree.add_all({number: _line(number) for number in range(100, 100 + INTERRUPTS)})
        for tid in range(3, 3 + THREADS):
            tree.add_thread(tid, f"kthread-{tid}", f"0-{CPUS - 1}")
        for number in range(DEVICES):
            queues = f"sys/class/net/veth{number}/queues"
            for queue in ("rx-0/rps_cpus", "rx-1/rps_cpus"):
                tree.put(f"{queues}/{queue}", world.cpus("0-1").hex_mask())
        node = Node(Path(folder), tree, world.flat(CPUS))
        try:
            node.run_pod("p", POD)
            yield node
        finally:
            node.close()


def _line(number: int) -> Line:
    """Return a queue of a network card, or a managed one of a disk."""
    own = number % CPUS
    about = f"PCI-MSIX-0000:00:02.0  {number}-edge      "
    if number < 100 + MOVABLE:
        return Line(f"{about}eth0-rx-{number}", f"0-{CPUS - 1}", 0, counts={own: 7})
    return Line(f"{about}nvme0q{number}", str(own), 0, EPERM, 0o444, {own: 7 + number})
