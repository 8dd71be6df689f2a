"""Sandboxes in the lab as Kata 3.21 lays them out: cgroups, vhost workers, a held QMP socket.

    pod = start_pod("p1")                     # a fixture, see conftest.py
    pod.create("c1", "4,5", exclusive=True)   # hooks as Kata runs them, then its cpuset
    pod.confine("4-7")

Version 2: all of QEMU is in /kata_<id>, what the shim starts otherwise is in /kata_overhead/<id>
and so are the vhost workers where they are kernel threads. Version 1: only vCPU threads are in
/kata_<id>. The daemon is a real `kata-pin run` on directories of its own (tests/support/daemon.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tests.e2e.cgroup import Cpuset, cgroup
from tests.e2e.node import Node
from tests.support import daemon, katalike
from tests.support.katalike import KataSandbox
from tests.support.qemu import Accelerator, Machine

KTHREADD: Final = 2
VHOST_WORKERS: Final = 3
"""Two queues of vhost-net and one vhost-vsock."""

VIRTIOFSDS: Final = ("/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd")
"""Debian 13's, written in Rust, and Debian 12's, written in C."""

_cids = itertools.count(1000)


def vhost_devices() -> tuple[str, ...]:
    """Return QEMU's arguments for a network card with two queues and a vsock, both by vhost."""
    card = "virtio-net-pci,netdev=network-0,mq=on,vectors=6,romfile="
    return (
        *("-netdev", "tap,id=network-0,script=no,downscript=no,vhost=on,queues=2"),
        *("-device", card, "-device", f"vhost-vsock-pci,guest-cid={next(_cids)}"),
        *("-device", "pcie-root-port,id=late"),
    )


class LabPod(daemon.Pod):
    """A sandbox with its cgroups; `workers` are its vhost workers, in whatever form."""

    def __init__(
        self, node: daemon.Node, kata: KataSandbox, own: Cpuset, overhead: Cpuset, version: int
    ) -> None:
        super().__init__(node, kata)
        self.cgroup = own
        self.overhead = overhead
        self._version = version
        self.workers: list[int] = []

    def confine(self, cpus: str) -> None:
        """Rewrite the sandbox's cpuset, as Kata does at each create, update and delete."""
        self.cgroup.write(cpus)
        if self._version == 1:
            for tid in self.kata.vcpus().values():
                self.cgroup.add_thread(tid)

    def update(self, cpus: Mapping[str, str | None], confined: str) -> None:
        """Update containers: Kata writes its state and the cpuset, and runs no hook."""
        for container_id, own in cpus.items():
            self.persist(container_id, own, exclusive=_is_exclusive(self, container_id))
        self.confine(confined)

    def look_for_workers(self) -> list[int]:
        """Return the vhost workers of QEMU: its own threads, or kernel threads by name."""
        self.workers = sorted(_named(f"vhost-{self.kata.pid}", self.kata.pid))
        return self.workers

    def helpers(self) -> list[int]:
        """Return the threads that work for the sandbox outside QEMU."""
        tids = [tid for tid in self.workers if Path(f"/proc/{tid}").exists()]
        if self.kata.virtiofsd_pid:
            tids += map(int, os.listdir(f"/proc/{self.kata.virtiofsd_pid}/task"))
        return tids

    def misplaced(self, rest: set[int], pairs: Mapping[int, int] | None = None) -> list[str]:
        """Return a line for each thread that is elsewhere, vhost workers and virtiofsd included."""
        lines = super().misplaced(rest, pairs)
        for tid in self.helpers():
            with contextlib.suppress(ProcessLookupError):
                affinity = os.sched_getaffinity(tid)
                if affinity != rest:
                    lines.append(f"helper {tid} on {affinity}, not {rest}")
        return lines

    def shown(self) -> dict[int, daemon.Json]:
        """Return what the daemon shows of each thread, by tid."""
        name = self.id.removeprefix(self.node.id_of(""))
        return {thread["tid"]: thread for thread in self.node.sandboxes()[name]["threads"]}


class Pods:
    """Starts pods of one daemon; they live until `stack` is closed."""

    def __init__(self, lab: Node, node: daemon.Node, stack: ExitStack) -> None:
        self._lab = lab
        self._node = node
        self._stack = stack

    def __call__(
        self,
        name: str = "p1",
        *,
        cpus: str = "",
        machine: Machine | None = None,
        cgroup_only: bool = False,
        accelerator: Accelerator = Accelerator.KVM,
        **options: Any,
    ) -> LabPod:
        """Start one; `cpus` is its first cpuset, all CPUs by default.

        `cgroup_only` is Kata's sandbox_cgroup_only: the shim's cgroup is the sandbox's too.
        """
        machine = machine or Machine(maximum=16, extra=vhost_devices())
        sandbox_id = self._node.id_of(name)
        every = f"0-{self._lab.cpus - 1}"
        enter = self._stack.enter_context
        own = enter(cgroup(self._lab, f"kata_{sandbox_id}", cpus or every))
        over = own if cgroup_only else enter(cgroup(self._lab, f"kata_overhead/{sandbox_id}"))
        kata = KataSandbox(
            self._node.dirs,
            sandbox_id,
            machine=machine,
            accelerator=accelerator,
            cgroups=[own.folder] if self._lab.cgroup == 2 or cgroup_only else [],
            overhead_cgroups=[over.folder],
            **options,
        )
        pod = LabPod(self._node, kata, own, over, self._lab.cgroup)
        self._stack.enter_context(pod)
        if self._lab.cgroup == 1 and not cgroup_only:
            pod.confine(cpus or every)
        self._lab.wait(lambda: len(pod.look_for_workers()) == _workers_of(machine), "vhost workers")
        return pod


@contextlib.contextmanager
def private_daemon(**settings: Any) -> Iterator[daemon.Node]:
    """A daemon on private directories that sees the machine's real debugfs and vhost devices."""
    katalike.VIRTIOFSD = next(Path(one) for one in VIRTIOFSDS if Path(one).exists())
    with daemon.private_node(**settings) as node:
        paths = {**node.settings["paths"], "debugfs": "/sys/kernel/debug"}
        node.configure(**{**settings, "paths": paths})
        yield node


def _workers_of(machine: Machine) -> int:
    return VHOST_WORKERS if "vhost-vsock-pci" in " ".join(machine.extra) else 0


def _named(name: str, tgid: int) -> Iterator[int]:
    """Yield the threads with that name in a process, and the kernel threads."""
    tids: Sequence[str] = os.listdir(f"/proc/{tgid}/task")
    kernel = Path(f"/proc/{KTHREADD}/task/{KTHREADD}/children").read_text().split()
    for path, tid in (
        *((f"/proc/{tgid}/task/{tid}/comm", tid) for tid in tids),
        *((f"/proc/{tid}/comm", tid) for tid in kernel),
    ):
        with contextlib.suppress(OSError):
            if Path(path).read_text().strip() == name:
                yield int(tid)


def _is_exclusive(pod: LabPod, container_id: str) -> bool:
    return any(one.id == container_id and one.quota for one in pod.kata.containers)
