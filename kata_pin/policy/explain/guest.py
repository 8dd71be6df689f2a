"""Which guest CPU each vCPU is, which ones each container uses, and why: lines for `explain`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from kata_pin.model.guest_map import GuestCpuset, GuestMap, Link, VcpuLink
from kata_pin.model.sandbox import Sandbox

_PLUGGED: Final = {
    True: "some vCPUs were hotplugged",
    False: "no vCPU was hotplugged",
    None: "the number of vCPUs at boot is unknown",
}


def guest_lines(sandbox: Sandbox, found: GuestMap, cpusets: Iterable[GuestCpuset]) -> Iterator[str]:
    """Yield the guest's kernel, one line per vCPU with its links, one line per container."""
    yield _kernel(found)
    titles = {one.id: one.title for one in sandbox.containers}
    for one in found.links:
        yield _vcpu(one, titles)
    for cpuset in cpusets:
        title = titles.get(cpuset.container_id, cpuset.container_id)
        where = "all guest CPUs" if cpuset.cpus is None else f"guest CPUs {cpuset.cpus}"
        yield f"{title}: {where}: {cpuset.reason}"


def _kernel(found: GuestMap) -> str:
    facts = found.facts
    plugged = _PLUGGED[found.hotplugged]
    source = f" ({facts.source})" if facts.source else ""
    return f"guest kernel: {facts.release or 'unknown'}{source}; {plugged}"


def _vcpu(one: VcpuLink, titles: dict[str, str]) -> str:
    steps = [f"tid {one.key.tid} {_how(one.thread_link)}"]
    if one.apic_id is not None:
        steps.append(f"APIC id {one.apic_id} {_how(one.apic_link)}")
    steps.append(f"number {_how(one.guest_link)}")
    index = "?" if one.index is None else one.index
    number = "?" if one.guest_cpu is None else one.guest_cpu
    owner = titles.get(one.container_id, one.container_id) or "no container"
    return f"vCPU {index} ({owner}) is guest CPU {number}, {one.state}: {', '.join(steps)}"


def _how(link: Link) -> str:
    return f"({link.state}: {link.source})"
