"""Why each vCPU is which guest CPU, and each container on which: lines for `explain`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kata_pin.model.guestmap import GuestCpuset, GuestMap, Link, VcpuLink
from kata_pin.model.sandbox import Sandbox


def guest_lines(sandbox: Sandbox, found: GuestMap, cpusets: Iterable[GuestCpuset]) -> Iterator[str]:
    """Yield the guest's kernel, one line a vCPU with every link, one line a container."""
    yield _kernel(found)
    titles = {one.id: one.title for one in sandbox.containers}
    for one in found.links:
        yield _vcpu(one, titles)
    for cpuset in cpusets:
        title = titles.get(cpuset.container_id, cpuset.container_id)
        where = "unrestricted" if cpuset.cpus is None else f"guest CPUs {cpuset.cpus}"
        yield f"{title}: {where}: {cpuset.reason}"


def _kernel(found: GuestMap) -> str:
    facts = found.facts
    plugged = "vCPUs were hotplugged" if found.hotplugged else "no hotplugged vCPU is there"
    if not facts.release:
        why = f" ({facts.source})" if facts.source else ""
        return f"{plugged}; the guest's kernel is not known{why}"
    return f"{plugged}; the guest's kernel is Linux {facts.release} ({facts.source})"


def _vcpu(one: VcpuLink, titles: dict[str, str]) -> str:
    index = "vCPU ?" if one.index is None else f"vCPU {one.index}"
    steps = [f"tid {one.key.tid} is {index} {_how(one.thread_link)}"]
    if one.apic_id is not None:
        steps.append(f"APIC id {one.apic_id} {_how(one.apic_link)}")
    number = "?" if one.guest_cpu is None else str(one.guest_cpu)
    steps.append(f"guest CPU {number} {_how(one.guest_link)}")
    owner = titles.get(one.container_id, one.container_id) or "nobody's own"
    return f"{', '.join(steps)}: {one.state}, {owner}"


def _how(link: Link) -> str:
    return f"({link.state}: {link.source})"
