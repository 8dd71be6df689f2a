"""How many vCPUs a sandbox gets, and which CPUs: the rules of Kata's two runtimes. Pure functions.

Facts: Kata's sandbox.go (updateResources, calculateSandboxCPUs, getSandboxCPUSet), oci/utils.go
(CalculateSandboxSizing), and runtime-rs cpu_mem (cpu.rs, initial_size.rs). `cpu` is the `cpu`
object of OCI's LinuxResources.
Out of scope: who asks when (sandbox.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

Cpu = Mapping[str, Any]


def parse(cpus: str) -> set[int]:
    """Return the CPUs of a Linux cpu list."""
    found: set[int] = set()
    for part in cpus.split(","):
        if part.strip():
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


def union(cpus: Iterable[Cpu]) -> set[int]:
    """Return the union of the containers' cpusets: what Kata confines the sandbox to."""
    together: set[int] = set()
    for cpu in cpus:
        together |= parse(cpu.get("cpus") or "")
    return together


def text(cpus: Iterable[int]) -> str:
    """Return a cpu list as Kata's cpuset package writes it: with ranges."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def quota(cpu: Cpu) -> float:
    """Return a container's limit in CPUs, 0 for none."""
    limit, period = cpu.get("quota") or 0, cpu.get("period") or 0
    return limit / period if limit > 0 and period > 0 else 0.0


def of_sandbox(annotations: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes that containerd annotates a pod's sandbox with; none with CRI-O."""
    names = ("cpu-quota", "cpu-period", "cpu-shares", "memory")
    keys = {name.removeprefix("cpu-"): f"io.kubernetes.cri.sandbox-{name}" for name in names}
    return {name: int(annotations.get(key) or 0) for name, key in keys.items()}


def static_go(default: float, _overhead: float, sandbox: Mapping[str, int]) -> int:
    """Return the Go runtime's number before the boot (3.32 and later): by quota, else by shares."""
    if sandbox["quota"] < 0:
        return math.ceil(default + math.ceil(sandbox["shares"] / 1024))
    return math.ceil(default + quota(sandbox))


def static_rs(default: float, overhead: float, sandbox: Mapping[str, int]) -> int:
    """Return runtime-rs's number before the boot (4.0 and later): by quota alone."""
    if quota(sandbox) or sandbox["memory"] > 0:
        return math.ceil(max(1, overhead + quota(sandbox)))
    return math.ceil(default)


def wanted_go(default: float, cpus: Iterable[Cpu]) -> int:
    """Return the Go runtime's number of vCPUs for the containers that are not stopped.

    The default, plus all quotas; without any quota plus the sizes of all cpusets, those that
    overlap counted twice.
    """
    all_cpus = list(cpus)
    more: float = sum(map(quota, all_cpus))
    if not more:
        more = sum(len(parse(cpu.get("cpus") or "")) for cpu in all_cpus)
    return math.ceil(default + more)


def wanted_rs(default: int, cpus: Iterable[Cpu]) -> int:
    """Return runtime-rs's number: default plus quotas, else the union's size without default."""
    all_cpus = list(cpus)
    limits = sum(map(quota, all_cpus))
    if limits:
        return math.ceil(default + limits)
    return len(union(all_cpus)) or default
