"""What a container can read about its placement: names and values, for its environment and a file.

A Kata container runs in a VM, where the host's CPU numbers mean nothing: it gets its guest CPUs,
and only in the file, because they are known only once its vCPUs are there. Pure. Out of scope:
where the file is (daemon/allocation/placement_files.py).
"""

from __future__ import annotations

from typing import Final

from kata_pin.model.alloc import Grant
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.topology import HostTopology

PREFIX: Final = "KATA_PIN_"
"""Begins the name of each variable in the environment."""


def values(grant: Grant, topology: HostTopology) -> dict[str, str]:
    """Return what is known when a container is created, by name; CPUs in Linux's list format."""
    found = {"CLASS": grant.cpu_class.value}
    if grant.request.pod.kata:
        return found | {"CPU_COUNT": str(len(grant.exclusive))}
    nodes = CpuSet(node for node, cpus in topology.nodes.items() if cpus & grant.cpus)
    return found | {
        "CPUS": str(grant.cpus),
        "EXCLUSIVE_CPUS": str(grant.exclusive),
        "SHARED_CPUS": str(grant.shared or ""),
        "NUMA_NODES": str(nodes),
    }


def file_text(grant: Grant, topology: HostTopology, guest_cpus: CpuSet | None) -> str:
    """Return the file's text, a line per value, as a shell reads it.

    `guest_cpus` are those that a Kata container is confined to, None while that is unknown.
    """
    found = values(grant, topology)
    if grant.request.pod.kata:
        found["GUEST_CPUS"] = str(guest_cpus or "")
    return "".join(f"{name}={value}\n" for name, value in found.items())
