"""Which vCPUs may be real-time threads without starving what else has to run. Pure.

A thread of SCHED_FIFO that never sleeps leaves its pCPU to nobody of a lower class. So a vCPU gets
that class only if it is alone on its pCPU, if the pCPU's ksoftirqd and RCU threads are of a higher
priority, and if the kernel keeps a part of the time for everybody else: before Linux 6.12 by
sched_rt_runtime_us, since then by the fair server (kernel/sched/rt.c, deadline.c).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kata_pin.model.measured.scheduling import RtNode
from kata_pin.model.placement import Placement
from kata_pin.model.thread import Thread, ThreadKey, ThreadRole


@dataclass(frozen=True)
class RtChoice:
    """The vCPUs that get the class, with their pCPUs, and why others do not."""

    threads: Mapping[ThreadKey, int] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()


def choose(
    threads: tuple[Thread, ...], placement: Placement | None, priority: int, node: RtNode
) -> RtChoice:
    """Return which of a sandbox's threads get SCHED_FIFO of this priority."""
    if placement is None:
        return RtChoice()
    paired = {
        one.key: one
        for one in threads
        if one.role.role is ThreadRole.VCPU
        and (desired := placement.desired.get(one.key)) is not None
        and desired.paired
        and not desired.release
        and len(desired.applied) == 1
        and one.task.affinity == desired.applied
    }
    why = _no_net(node)
    if why or not paired:
        return RtChoice(refusals=(why,) if why and paired else ())
    chosen: dict[ThreadKey, int] = {}
    refusals: list[str] = []
    for key, vcpu in paired.items():
        cpu = vcpu.task.affinity.first
        beside = [one for one in threads if one.key != key and cpu in one.task.affinity]
        refusal = _refusal(cpu, beside, priority, node)
        if refusal:
            refusals.append(f"{vcpu.label} on pCPU {cpu}: {refusal}")
        else:
            chosen[key] = cpu
    return RtChoice(chosen, tuple(refusals))


def _no_net(node: RtNode) -> str:
    """Return why nothing keeps time for other threads, empty if something does."""
    if node.fair_server:
        return ""
    if node.runtime_us is None or node.period_us is None:
        return "kernel.sched_rt_runtime_us cannot be read"
    if node.runtime_us < 0 or node.runtime_us >= node.period_us:
        return (
            "kernel.sched_rt_runtime_us leaves no time to other threads, and this kernel has no "
            "fair server (Linux 6.12): a busy vCPU would block its pCPU for good"
        )
    if node.runtime_us == 0:
        return "kernel.sched_rt_runtime_us is 0: real-time threads get no time"
    return ""


def _refusal(cpu: int, beside: list[Thread], priority: int, node: RtNode) -> str:
    """Return why a vCPU may not be real-time on this pCPU, empty if it may."""
    if cpu in node.unserved:
        return "the kernel's fair server is switched off there"
    if beside:
        others = ", ".join(sorted({one.label for one in beside}))
        return (
            f"threads of the sandbox may run there too ({others}): set overhead_roles to other "
            "pCPUs"
        )
    guards = node.guards.get(cpu)
    if guards is None:
        return f"ksoftirqd/{cpu} was not found"
    for name, its in sorted(guards.items()):
        if its <= priority:
            has = f"has priority {its}" if its else "is no real-time thread"
            return f"{name} {has} and would starve: give it a priority above {priority} (chrt -f)"
    return ""
