"""Processes beside the sandboxes under test, which nobody may move: a lookalike and a real VM.

The VM is a QEMU that is no sandbox's, with vCPU threads and a vhost worker of its own where the
machine has KVM; the lookalike has a VMM's name and a sandbox's argument.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

from tests.e2e.idlevm import idle_vm
from tests.e2e.node import Node
from tests.support.vmmhost import lookalike

_VSOCK: Final = ("-device", "vhost-vsock-pci,guest-cid=999")


class Bystanders:
    """The threads that are looked at before and after."""

    def __init__(self, node: Node, pids: Sequence[int]) -> None:
        self._node = node
        self._pids = pids
        self._masks: dict[int, set[int]] = {}

    def look(self) -> None:
        """Remember where they are."""
        self._masks = self._now()
        assert len(self._masks) > len(self._pids)

    def check(self) -> None:
        """Assert that they are where they were; one that exits by itself says nothing."""
        now = self._now()
        moved = {tid: cpus for tid, cpus in now.items() if self._masks.get(tid, cpus) != cpus}
        assert moved == {}, f"bystanders were moved; before: {self._masks}"

    def _now(self) -> dict[int, set[int]]:
        masks = {}
        for tid in self._tids():
            with contextlib.suppress(ProcessLookupError):
                masks[tid] = os.sched_getaffinity(tid)
        return masks

    def _tids(self) -> Iterator[int]:
        for pid in self._pids:
            yield from map(int, os.listdir(f"/proc/{pid}/task"))


@contextlib.contextmanager
def bystanders(node: Node) -> Iterator[Bystanders]:
    """Start them; they live as long as the tests."""
    with ExitStack() as stack:
        pids = [stack.enter_context(lookalike("-name", "sandbox-bystander", "-smp", "2")).pid]
        if node.kvm:
            pid = stack.enter_context(idle_vm(node, *_VSOCK))
            pids += [pid, *_kernel_workers(pid)]
        yield Bystanders(node, pids)


def _kernel_workers(pid: int) -> list[int]:
    """Return vhost workers that are kernel threads (Linux 6.1); later ones are QEMU's threads."""
    found = []
    with open("/proc/2/task/2/children", encoding="ascii") as file:
        for child in file.read().split():
            with contextlib.suppress(OSError), open(f"/proc/{child}/comm") as comm:
                if comm.read().strip() == f"vhost-{pid}":
                    found.append(int(child))
    return found
