"""Who has which CPUs on this node, from four sides that have to agree.

    pools = NodePools(node, unit, containerd)
    pod, app = pools.kata("k1", **cpus(2))
    pools.agree("k1 created")

The sides: the daemon's grants, what the runtime is told (`written`, `pending`), the cgroups that
runc and minikata wrote, and the affinities of processes and of QEMU's threads, found without
kata-pin. Out of scope: who should have how many, which each test says.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kata_pin.base.cpuset import CpuSet, union
from tests.e2e.criruntime import CGROUP, HANDLER, CriNode, qemu_pid
from tests.e2e.node import Node
from tests.e2e.nodepods import VmThreads
from tests.e2e.unit import Json, Unit

KEY: Final = "cpu-policy.kata-pin.io"
DEFAULT_VCPUS: Final = 1
"""What Kata adds to the limits of a VM's containers."""


def cpus(count: int) -> dict[str, int]:
    """Return what the kubelet writes for a request and a limit of so many CPUs."""
    return {"cpu_quota": count * 100_000, "cpu_period": 100_000, "cpu_shares": count * 1024}


@dataclass
class NodePools:
    """The containers that a test made: runc's, and by pod Kata's with the vCPUs of their VM."""

    node: Node
    unit: Unit
    containerd: CriNode
    plain: list[str] = field(default_factory=list)
    vms: dict[str, tuple[str, int]] = field(default_factory=dict)
    pods: dict[str, str] = field(default_factory=dict)

    # ---- making --------------------------------------------------------------------------

    def runc(self, name: str, cpu_class: str = "", **resources: int) -> str:
        """Start a pod without a VM, and its container; return the container's id."""
        _, container = self._run(name, "", cpu_class, resources)
        self.plain.append(container)
        return container

    def kata(self, name: str, cpu_class: str = "", **resources: int) -> tuple[str, str]:
        """Start a pod of Kata's and its container; return the ids of both."""
        pod, container = self._run(name, HANDLER, cpu_class, resources)
        self.sized(pod, container, resources.get("cpu_quota", 0))
        return pod, container

    def _run(
        self, name: str, handler: str, cpu_class: str, resources: dict[str, int]
    ) -> tuple[str, str]:
        annotations = {KEY: cpu_class} if cpu_class else {}
        pod = self.containerd.run_pod(name, handler, **annotations)
        container = self.containerd.create(pod, name, "app", **resources)
        self.pods[container] = pod
        return pod, container

    def resize(self, pod: str, container: str, count: int) -> None:
        """Change a container of Kata's to so many CPUs, as the kubelet does in place."""
        self.containerd.cri.update(container, **cpus(count))
        self.sized(pod, container, cpus(count)["cpu_quota"])

    def sized(self, pod: str, container: str, quota: int) -> None:
        """Take note of how many vCPUs Kata's rule gives for a quota, whatever the pools."""
        self.vms[pod] = container, DEFAULT_VCPUS + quota // 100_000

    def stop(self, container: str) -> None:
        """Stop a container and its pod; it is not looked at any more."""
        self.containerd.cri.stop(container)
        self.containerd.cri.stop_pod(self.pods[container])
        self.plain = [one for one in self.plain if one != container]
        self.vms = {pod: told for pod, told in self.vms.items() if told[0] != container}

    def nudge(self) -> None:
        """Have the runtime call: its answer brings what is pending. Nothing else changes."""
        self.containerd.cri.update(self.plain[0], cpu_shares=2)

    # ---- looking -------------------------------------------------------------------------

    def allocation(self) -> Json:
        """Return what the daemon shows of the allocator."""
        return dict(self.unit.state()["allocation"])

    def grant(self, container: str) -> Json:
        """Return what the daemon shows of a container's grant."""
        return next(one for one in self.allocation()["grants"] if one["id"] == container)

    def own(self, container: str) -> CpuSet:
        """Return the CPUs that are a container's alone."""
        return CpuSet.parse(self.grant(container)["exclusive"])

    def threads(self, pod: str) -> set[int]:
        """Return the threads of a sandbox's QEMU, and those the daemon knows beside them.

        Not its shim's, which are left alone as shipped.
        """
        shown = self.unit.sandbox(pod)["threads"]
        known = {int(one["tid"]) for one in shown if one["role"] != "shim"}
        return known | set(VmThreads(qemu_pid(pod)).affinities())

    def processes(self, container: str) -> set[int]:
        """Return the processes of a container of runc's."""
        return _processes(cpuset_file(container).parent)

    def agree(self, step: str, seconds: float = 12, *, nudging: bool = False) -> None:
        """Wait until nothing is pending and all four sides agree; fail naming who does not.

        `nudging`: what is pending waits for an answer to the runtime, so have it call. CPUs that a
        VM gives up are pending only once a pass has moved its threads.
        """
        lines: list[str] = []

        def right() -> bool:
            lines[:] = self.disagreements()
            if nudging and any(one["pending"] for one in self.allocation()["grants"]):
                self.nudge()
            return not lines

        try:
            self.node.wait(right, f"agreement: {step}", seconds)
        except AssertionError as error:
            error.add_note("\n".join(lines))
            raise

    def disagreements(self) -> list[str]:
        """Return a line for each contradiction there is now."""
        shown = self.allocation()
        grants = {one["id"]: one for one in shown["grants"]}
        missing = [
            f"no grant for {one}"
            for one in (*self.plain, *(container for container, _ in self.vms.values()))
            if one not in grants
        ]
        if missing:
            return missing
        lines = [
            f"{one['id']}: pending {one['pending']}" for one in grants.values() if one["pending"]
        ]
        lines += _of_pools(shown, grants)
        for container in self.plain:
            lines += _of_runc(grants[container])
        exclusive = CpuSet.parse(shown["pools"]["exclusive"])
        overhead = CpuSet.parse(shown["pools"]["housekeeping"])
        for pod, (container, vcpus) in self.vms.items():
            foreign = exclusive - CpuSet.parse(grants[container]["exclusive"])
            lines += self._of_kata(pod, grants[container], vcpus, foreign, overhead)
        return lines

    def _of_kata(
        self, pod: str, grant: Json, vcpus: int, foreign: CpuSet, overhead: CpuSet
    ) -> Iterator[str]:
        """A sandbox: cgroup as written, vCPUs as Kata's rule, pairs, nobody on others' CPUs."""
        told = cpuset(f"kata_{pod}")
        if told != grant["cpuset"]:
            yield f"{pod}: cgroup {told or 'none'}, cpuset {grant['cpuset'] or 'none'}"
        masks = {vcpu: _mask(tid) for vcpu, tid in VmThreads(qemu_pid(pod)).vcpus().items()}
        if len(masks) != vcpus:
            yield f"{pod}: {len(masks)} vCPUs, not {vcpus}"
        yield from _of_vcpus(pod, grant, list(masks.values()), overhead)
        for tid in sorted(self.threads(pod)):
            with contextlib.suppress(ProcessLookupError):
                if _mask(tid) & foreign:
                    yield f"{pod}: thread {tid} may run on {_mask(tid)}, others have {foreign}"


def _of_pools(shown: Json, grants: dict[str, Json]) -> Iterator[str]:
    """No CPU is exclusive twice or shared too, and none is lost."""
    pools = {name: CpuSet.parse(text) for name, text in shown["pools"].items()}
    held = [CpuSet.parse(one["exclusive"]) for one in grants.values()]
    if sum(map(len, held)) != len(union(held)) or union(held) != pools["exclusive"]:
        yield f"exclusive {pools['exclusive']} of {', '.join(map(str, held))}"
    if pools["exclusive"] & pools["shared"]:
        yield f"both shared and exclusive: {pools['exclusive'] & pools['shared']}"
    lost = CpuSet(os.sched_getaffinity(1)) - union(pools.values())
    if lost:
        yield f"in no pool: {lost}"


def _of_runc(grant: Json) -> Iterator[str]:
    """A container of runc's: grant, written, its cgroup and its processes say the same."""
    file = cpuset_file(grant["id"])
    told = file.read_text().strip()
    sides = {"written": grant["cpuset"], "cgroup": told}
    for pid in _processes(file.parent):
        with contextlib.suppress(ProcessLookupError):
            sides[f"process {pid}"] = str(_mask(pid))
    for side, text in sides.items():
        if text != grant["cpus"]:
            yield f"{grant['pod']}: {side} {text or 'none'}, given {grant['cpus']}"


def _processes(folder: Path) -> set[int]:
    return {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}


def _of_vcpus(pod: str, grant: Json, masks: list[CpuSet], overhead: CpuSet) -> Iterator[str]:
    """Each exclusive CPU has one vCPU to itself; surplus ones stay in what the VM has."""
    given = CpuSet.parse(grant["cpus"]) | overhead
    alone = sorted(str(one) for one in masks if len(one) == 1)
    pairs = sorted(str(cpu) for cpu in CpuSet.parse(grant["exclusive"]))
    if pairs and alone != pairs:
        yield f"{pod}: vCPUs on {', '.join(map(str, masks))}, its own are {', '.join(pairs)}"
    yield from (f"{pod}: a vCPU on {one}, given {given}" for one in masks if not one <= given)


def cpuset_file(name: str) -> Path:
    """Return the cpuset of a cgroup below the pods' parent: a container's or `kata_<sandbox>`."""
    roots = [Path("/sys/fs/cgroup") / part for part in ("", "cpuset")]
    (file,) = (
        path for root in roots for path in root.glob(f"{CGROUP.lstrip('/')}/**/{name}/cpuset.cpus")
    )
    return file


def cpuset(name: str) -> str:
    """Return what that file says."""
    return cpuset_file(name).read_text().strip()


def _mask(tid: int) -> CpuSet:
    return CpuSet(os.sched_getaffinity(tid))
