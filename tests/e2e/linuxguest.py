"""A pod whose VM boots Linux and runs an agent: what its guest says, what its threads do.

    guest = Guest(node, cid)
    guest.processes()                    # where each container's process may run, and ran last
    before = Ran.now(); ...; Ran.now().since(before)

The guest is `.cache/guest` of the checkout (tests/e2e/guest/build.py). Everything is asked of
the guest's and the host's kernels, nothing of kata-pin.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from kata_pin.base.cpuset import CpuSet
from kata_pin.peers.agent.messages import parse_cpuinfo
from tests.e2e.idlevm import vcpu_tids
from tests.e2e.node import Node
from tests.support.hooks import COMMAND, PATIENT

GUEST: Final = Path(__file__).resolve().parents[2] / ".cache/guest"
ASK_PORT: Final = 1025
BUSY: Final = {"minikata.guest.run": "while :; do :; done"}
"""Annotation of a container that never rests."""


def linux(node: Node, **settings: Any) -> dict[str, Any]:
    """Return minikata's settings for sandboxes with this guest."""
    files = {"kernel": str(GUEST / "vmlinuz"), "initrd": str(GUEST / "initrd.img")}
    return {"guest": "linux", "accel": "kvm", "scale": node.scale, **files, **settings}


def hooks(runtime_dir: Path) -> dict[str, Any]:
    """Return the `hooks` of config.json for a daemon on directories of its own."""
    arguments = [*COMMAND, *PATIENT]
    where = f"--runtime-dir={runtime_dir}"
    return {
        phase: [{"path": COMMAND[0], "args": [*arguments, phase, where], "env": []}]
        for phase in ("createRuntime", "poststart", "poststop")
    }


@dataclass(frozen=True)
class Process:
    """A container's process in the guest; `last` is the guest CPU it ran on last."""

    container: str
    pid: int
    allowed: CpuSet
    last: int


class Guest:
    """Asks the tester's port of a guest."""

    def __init__(self, node: Node, cid: int) -> None:
        self._node = node
        self._cid = cid

    def ask(self, question: str) -> str:
        """Return the answer to a question (agent.py); an agent that just restarts is waited for."""
        limit = time.monotonic() + 10 * self._node.scale
        while True:
            try:
                return self._ask(question)
            except OSError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.2)

    def _ask(self, question: str) -> str:
        with socket.socket(socket.AF_VSOCK) as connection:
            connection.settimeout(10 * self._node.scale)
            connection.connect((self._cid, ASK_PORT))
            connection.sendall(question.encode())
            with connection.makefile() as answer:
                return answer.read().strip()

    def restart_agent(self) -> None:
        """Have the agent end, and wait for the next one; containers live on."""
        before = self.ask("agent")
        self.ask("restart")
        self._node.wait(lambda: self.ask("agent") not in {before, ""}, "another agent", 20)

    def mode(self, name: str) -> None:
        """Have the agent behave so from now on."""
        assert self.ask(f"mode {name}") == name

    def processes(self) -> list[Process]:
        """Return the processes of all containers, as the guest's /proc has them."""
        rows = [line.split() for line in self.ask("processes").splitlines()]
        return [
            Process(c, int(pid), CpuSet.parse(cpus), int(last)) for c, pid, cpus, last, _ in rows
        ]

    def cpu_of_apic(self) -> dict[int, int]:
        """Return the guest's CPU numbers by APIC id."""
        return {apic: cpu for cpu, apic in parse_cpuinfo(self.ask("cpuinfo").encode()).items()}


def vcpus(pid: int) -> dict[int, int]:
    """Return the living vCPU threads of a QEMU by APIC id, as KVM has them.

    A vCPU that was unplugged leaves the tid of its dead thread behind.
    """
    living = set(os.listdir(f"/proc/{pid}/task"))
    return {apic: tid for apic, tid in vcpu_tids(pid).items() if str(tid) in living}


@dataclass(frozen=True)
class Run:
    """What one thread did: its name, the pCPU it ran on last, and how long it ran, in ns."""

    name: str
    cpu: int
    ns: int


@dataclass(frozen=True)
class Ran:
    """Every thread of the machine, by tid."""

    at: float
    threads: dict[int, Run]

    @classmethod
    def now(cls) -> Self:
        """Look at all of them."""
        found = {}
        for process in os.listdir("/proc"):
            if not process.isdigit():
                continue
            with contextlib.suppress(OSError):
                for tid in os.listdir(f"/proc/{process}/task"):
                    with contextlib.suppress(OSError, ValueError, IndexError):
                        found[int(tid)] = _run(f"/proc/{process}/task/{tid}")
        return cls(time.monotonic(), found)

    def since(self, before: Ran) -> Ran:
        """Return what was run between two looks; threads that ended meanwhile are missed."""
        ns = {tid: one.ns for tid, one in before.threads.items()}
        threads = {
            tid: Run(one.name, one.cpu, one.ns - ns.get(tid, 0))
            for tid, one in self.threads.items()
        }
        return Ran(self.at - before.at, threads)

    def share(self, tid: int) -> float:
        """Return which share of the time a thread ran."""
        return self.threads[tid].ns / 1e9 / self.at

    def foreign(self, cpu: int, own: int) -> list[tuple[int, str, float]]:
        """Return tid, name and share of the time of all others on a pCPU, greatest share first."""
        others = [
            (tid, one.name, one.ns / 1e9 / self.at)
            for tid, one in self.threads.items()
            if one.cpu == cpu and tid != own and one.ns
        ]
        return sorted(others, key=lambda one: one[2], reverse=True)


def _run(folder: str) -> Run:
    with open(f"{folder}/stat", encoding="utf-8", errors="replace") as file:
        head, _, tail = file.read().rpartition(") ")
    with open(f"{folder}/schedstat", encoding="ascii") as file:
        return Run(head.partition("(")[2], int(tail.split()[36]), int(file.read().split()[0]))
