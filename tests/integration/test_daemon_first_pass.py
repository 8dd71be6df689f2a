"""The first passes after a restart: recorded sandboxes come before everything else (D1).

What it takes is counted, not timed: the daemon's objects run in the test's own process, and every
call that needs rights is noted with the process that it is about.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import pytest

from kata_pin.base.config.tree import Config
from kata_pin.linux.files import HostRoot
from kata_pin.rights.broker.protocol import AffinityChange, Changed, FileStatus
from kata_pin.rights.broker.threads import ThreadCall
from kata_pin.rights.calls import Calls
from kata_pin.service.assembly import Assembly
from kata_pin.service.configuration import load
from kata_pin.service.process import Background, Notifier
from kata_pin.service.runtime_dir import held_registry
from tests.support.daemon import Node, Pod
from tests.support.qemu import QEMU
from tests.support.waiting import SCALE

pytestmark = [pytest.mark.qemu, pytest.mark.root]

STRANGERS = 40
"""Processes of root's that look like VMMs of other sandboxes, each of which a survey reads."""

_PROC = re.compile(r"/proc/(\d+)(?:/|\Z)")


class NotedCalls(Calls):
    """Notes whose affinity is set, and which processes are read, in order."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, int]] = []

    def set_affinities(self, changes: Sequence[AffinityChange], proc: str) -> list[Changed]:
        """See Calls."""
        self.noted += [("set", change.tgid) for change in changes]
        return super().set_affinities(changes, proc)

    def executable(self, pid: int) -> tuple[FileStatus, str]:
        """See Calls."""
        self.noted.append(("read", pid))
        return super().executable(pid)

    def executables(self, pids: Sequence[int]) -> list[str]:
        """See Calls."""
        self.noted += [("read", pid) for pid in pids]
        return super().executables(pids)

    def stat(self, path: str) -> FileStatus:
        """See Calls."""
        self._note(path)
        return super().stat(path)

    def listdir(self, path: str) -> list[str]:
        """See Calls."""
        self._note(path)
        return super().listdir(path)

    def system_calls(self, process: str, tids: Sequence[int]) -> list[ThreadCall]:
        """See Calls."""
        self._note(process)
        return super().system_calls(process, tids)

    def descriptors(self, process: str) -> list[str]:
        """See Calls."""
        self._note(process)
        return super().descriptors(process)

    async def read_slow(
        self, requests: Sequence[tuple[int, str, int]], deadline_s: float
    ) -> Mapping[tuple[int, str], bytes | OSError]:
        """See Calls; patient, so that a loaded machine does not make processes look hung."""
        self.noted += [("read", pid) for pid, _, _ in requests]
        return await super().read_slow(requests, deadline_s * 100)

    def _note(self, path: str) -> None:
        match = _PROC.match(path)
        if match is not None:
            self.noted.append(("read", int(match[1])))


@contextlib.contextmanager
def strangers(node: Node) -> Iterator[set[int]]:
    """Run processes that claim to be VMMs, with an allowed executable and root's rights."""
    with contextlib.ExitStack() as stack:
        pids = set()
        for number in range(STRANGERS):
            name = f"sandbox-{node.id_of(f'other{number}')}"
            argv = ["qemu-system-x86_64", "-c", "input()", "-name", name]
            process = subprocess.Popen(argv, executable=sys.executable, stdin=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            pids.add(process.pid)
        yield pids


@pytest.fixture
def broker() -> Iterator[subprocess.Popen[bytes]]:
    """A process in the broker's place; it and this one are kept off exclusive pCPUs."""
    before = os.sched_getaffinity(0)
    with subprocess.Popen(["sleep", "infinity"]) as process:
        yield process
        process.kill()
    for tid in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(tid), before)


async def start_again(
    node: Node, pods: Sequence[Pod], broker: subprocess.Popen[bytes]
) -> list[tuple[str, int]]:
    """Take in what there is, as a start does, until pods are placed, and claims were compared.

    Returns what was noted.
    """
    config: Config = load(str(node.config))
    calls = NotedCalls()
    with held_registry(config) as registry:
        async with asyncio.TaskGroup() as tasks:
            background = Background(tasks)
            parts = Assembly(
                config,
                registry,
                background,
                lambda: config,
                Notifier({}),
                root=HostRoot(debugfs=config.paths.debugfs, calls=calls),
                broker=broker.pid,
            )
            with contextlib.closing(parts.hooks):
                parts.hooks.bind()
                await parts.take_in()
                async with asyncio.timeout(20 * SCALE):
                    while any(pod.misplaced({0}, {1: 1}) for pod in pods):
                        await asyncio.sleep(0.01)
                    while not _refused(parts, pods[0]):
                        await asyncio.sleep(0.01)
                background.end()
    return calls.noted


def _refused(parts: Assembly, pod: Pod) -> bool:
    """Whether the pod's VMM was compared with the bystander that claims the same sandbox."""
    vmm = parts.sandboxes.known_vmm(pod.id)
    return vmm is not None and bool(vmm.refused)


async def test_recorded_sandboxes_are_pinned_before_strangers_are_read(
    node: Node, broker: subprocess.Popen[bytes]
) -> None:
    """Until every thread that moved is back, no process is read that works for none of them."""
    node.configure(hypervisors=[QEMU, os.path.realpath(sys.executable)], user="root")
    daemon = node.start()
    with node.pod("p1") as one, node.pod("p2") as two:
        pods = (one, two)
        for pod in pods:
            pod.announce()
            pod.create(f"{pod.id}-c1", "1", exclusive=True)
            pod.create(f"{pod.id}-c2", "0")
        daemon.kill()
        for pod in pods:
            for tid in pod.kata.tids():
                os.sched_setaffinity(tid, {0, 1})
        own = {pid for pod in pods for pid in (pod.kata.pid, pod.kata.shim.pid)}
        moved = {("set", pod.kata.pid) for pod in pods}
        with strangers(node) as others:
            noted = await start_again(node, pods, broker)
        last = max(place for place, one in enumerate(noted) if one in moved)
        assert set(noted[:last]) >= moved
        assert {pid for what, pid in noted[:last] if what == "read"} <= own
        assert {pid for what, pid in noted[last:] if what == "read"} >= others
