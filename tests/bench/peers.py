"""Beside libvirt: one VM of the same shape each, in one run, in turns.

Floor is always libvirt's time for the same thing, so a ratio below 1 means that kata-pin is faster.
virsh gets all commands in one session where the row does not say otherwise. Each round pins another
CPU than the one before, so that every thread has to move, with libvirt's cgroups too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.bench.commands import run_s
from tests.bench.events import Births, Waits, messages_of, take, until_done
from tests.bench.figures import MS, BenchError, Row, Samples, in_turns, median_row, timed
from tests.bench.hooks import HookRunner
from tests.bench.libvirt import DOMAIN, Libvirt
from tests.bench.node import BenchNode, scatter
from tests.bench.service import local_service, service
from tests.support.installed import installed
from tests.support.katalike import KataSandbox
from tests.support.qemu import TWENTY

PLUGS = 20

BESIDE = 2.0
"""Time of a command, as a ratio to one session of virsh that does the same."""
"""Most hotplugged vCPUs of a run: the VM keeps them."""


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the rows: listing, pinning, following a hotplugged vCPU, threads left over."""
    if len(node.online) < 2:
        raise BenchError("needs two pCPUs to tell a pinned thread from another")
    node.start(1)
    plugs = min(rounds, PLUGS)
    machine = dataclasses.replace(TWENTY, maximum=TWENTY.boot + plugs)
    [ours] = node.sandboxes
    program = (str(installed(node.root)),)
    with Libvirt(node.root, machine) as libvirt:
        yield from asyncio.run(_passes(node, ours, libvirt, rounds))
        yield _left("libvirt with its cgroups", libvirt.pid, libvirt.tids(), node.last_cpu)
        with service(node, program):
            yield from _commands(node, program, ours, libvirt, rounds)
            yield _left("kata-pin", ours.pid, ours.tids(), node.last_cpu)
        node.sandboxes.append(_grown(node, plugs))
        with service(node):
            yield _hotplug(node, node.sandboxes[-1], libvirt, plugs)
    with Libvirt(node.root, machine, cgroups=False) as libvirt:
        libvirt.virsh(*libvirt.pins(node.last_cpu))
        yield _left("libvirt without cgroups", libvirt.pid, libvirt.tids(), node.last_cpu)


async def _passes(node: BenchNode, ours: KataSandbox, libvirt: Libvirt, rounds: int) -> list[Row]:
    """Measure the daemon's pass, from a message to the last thread verified, and virsh's pins."""
    everywhere = frozenset(node.online)
    async with local_service(node.config()) as daemon:
        await daemon.settle([ours.id])
        message = messages_of(node.container(ours.id, "c1", cpus=str(node.last_cpu)), ours.pid)
        await take(daemon, next(message))
        passes, session = Waits(), []
        for _ in range(rounds):
            scatter(ours.tids(), everywhere)
            await passes.take(take(daemon, next(message)))
            session.append(_repin(node, libvirt))
    row = median_row(f"pin {len(ours.tids())} threads: a pass", passes.wall, Samples(session))
    used = f"CPU p50 {passes.cpu.median * MS:.2f}; floor: {libvirt.version}, virsh"
    return [dataclasses.replace(row, detail=f"{row.detail}; {used}")]


def _repin(node: BenchNode, libvirt: Libvirt) -> float:
    """Have libvirt pin everything to the first CPU, then to the last; return the second's time."""
    libvirt.virsh(*libvirt.pins(next(iter(node.online))))
    return timed(lambda: libvirt.virsh(*libvirt.pins(node.last_cpu)))


def _commands(
    node: BenchNode, program: Sequence[str], ours: KataSandbox, libvirt: Libvirt, rounds: int
) -> Iterator[Row]:
    """Yield the rows of command lines: from exec to exit, on both sides."""
    command = (*program, "--config", str(node.root / "config.yaml"))
    look = (f"vcpuinfo {DOMAIN}", f"iothreadinfo {DOMAIN}", f"emulatorpin {DOMAIN}")
    everywhere = frozenset(node.online)

    def pin() -> float:
        scatter(ours.tids(), everywhere)
        return run_s((*command, "pin", ours.id))

    shown, session, each = in_turns(
        rounds,
        lambda: run_s((*command, "show", ours.id)),
        lambda: timed(lambda: libvirt.virsh(*look)),
        lambda: timed(lambda: [libvirt.virsh(one) for one in look]),
    )
    yield median_row("list roles and affinities: kata-pin show", shown, session, bar=BESIDE)
    yield median_row(f"the same beside {len(look)} virsh commands", shown, each)
    pins = libvirt.pins(node.last_cpu)
    pinned, session, each = in_turns(
        rounds,
        pin,
        lambda: _repin(node, libvirt),
        lambda: timed(lambda: [libvirt.virsh(one) for one in pins]),
    )
    yield median_row(f"pin {len(ours.tids())} threads: kata-pin pin", pinned, session, bar=BESIDE)
    yield median_row(f"the same beside {len(pins)} virsh commands", pinned, each)


def _grown(node: BenchNode, plugs: int) -> KataSandbox:
    """Start a sandbox that has room for vCPUs."""
    return KataSandbox(
        node.dirs, "plug", dataclasses.replace(TWENTY, maximum=TWENTY.boot + plugs),
        shim_process=False, containers=node.specs("plug")[:1],
    ).start()  # fmt: skip


def _hotplug(node: BenchNode, ours: KataSandbox, libvirt: Libvirt, plugs: int) -> Row:
    """Measure from the birth of a hotplugged vCPU's thread to its pin, which libvirt knows before.

    The VM's main thread may run anywhere on both sides, so the new thread inherits no pin.
    """
    everywhere, last = frozenset(node.online), frozenset({node.last_cpu})
    run = HookRunner(node)
    run.time(
        "createRuntime", node.container(ours.id, "c1", cpus=str(node.last_cpu)).state(ours.pid)
    )
    libvirt.virsh(f"emulatorpin {DOMAIN} {node.online}")
    first = libvirt.machine.boot
    numbers = iter(range(first, first + plugs))
    with Births() as births:

        def follow(pid: int, plug: Callable[[], object]) -> float:
            os.sched_setaffinity(pid, everywhere)
            births.drain()
            plugging = threading.Thread(target=plug)
            plugging.start()
            try:
                return until_done(pid, births, lambda _, tid: os.sched_getaffinity(tid) == last)
            finally:
                plugging.join()

        def theirs() -> float:
            number = next(numbers)
            libvirt.virsh(f"vcpupin {DOMAIN} {number} {node.last_cpu}")
            return follow(
                libvirt.pid, lambda: libvirt.virsh(f"setvcpus {DOMAIN} {number + 1} --live")
            )

        mine, floor = in_turns(plugs, lambda: follow(ours.pid, lambda: ours.shim.plug(1)), theirs)
    return median_row("vCPU hotplugged to pinned", mine, floor)


def _left(who: str, pid: int, tids: list[int], cpu: int) -> Row:
    """Return the row of the threads that may still run elsewhere, with their names."""
    left = [tid for tid in tids if os.sched_getaffinity(tid) != {cpu}]
    names = (Path(f"/proc/{pid}/task/{tid}/comm").read_text().strip() for tid in left)
    bar = 0 if who == "kata-pin" else None
    return Row(
        f"threads left unpinned by {who}", len(left), "threads", len(tids),
        bar=bar, bar_on_ratio=False, detail=", ".join(names),
    )  # fmt: skip
