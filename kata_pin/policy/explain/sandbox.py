"""Why every thread of a sandbox is where it is, in plain lines for a person.

Sections stand without indentation, their lines are indented; no colours, no widths: how it looks
is the command line's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node import Node
from kata_pin.model.placement import Desired, Placement, Provenance
from kata_pin.model.sandbox import Container, GuestTopology, ReportedCpuset, Sandbox
from kata_pin.model.thread import Thread, ThreadRole
from kata_pin.policy.placement import notes
from kata_pin.policy.placement.locality import vicinities
from kata_pin.policy.placement.mask import counted
from kata_pin.policy.placement.overhead import reserve_size
from kata_pin.policy.placement.pools import exclusive_pools
from kata_pin.policy.placement.precedence import why


def explain(
    sandbox: Sandbox,
    threads: Sequence[Thread],
    placement: Placement,
    node: Node,
    *,
    guest: Sequence[str] = (),
    now_ns: int = 0,
) -> tuple[str, ...]:
    """Return the lines: containers, mask, exclusive CPUs and why, VM size, threads, guest, notes.

    `guest` are the lines of guestwords.py, left out where there are none. `now_ns` is
    CLOCK_BOOTTIME, for the ages of what sources told.
    """
    lines = [f"sandbox {sandbox.id} ({sandbox.pod})"]
    for title, body in (
        ("containers", _containers(sandbox, node, now_ns)),
        ("mask", _mask(placement)),
        ("exclusive", _exclusive(sandbox, placement)),
        ("VM size", _size(threads, placement, node)),
        ("threads", _threads(sandbox, threads, placement, node)),
        *([("guest", guest)] if guest else []),
        ("notes", (f"{one.level}: {one.code}: {one.text}" for one in placement.notes)),
    ):
        lines.append(title)
        lines += [f"  {line}" for line in body] or ["  none"]
    return tuple(lines)


def _containers(sandbox: Sandbox, node: Node, now_ns: int) -> Iterator[str]:
    counting = {one.id for one in counted(sandbox, node)}
    for one in sandbox.containers:
        counts = "" if one.id in counting else ", does not count"
        yield (
            f"{one.title} ({one.kind}, {one.state}{counts}): {_cpuset(one)},"
            f" recorded from {one.source or 'an unknown source'}"
        )
        if one.reported:
            told = "; ".join(_told(each, now_ns) for each in one.reported)
            yield f"{one.title}: {told}: {why(one.reported)}"


def _told(told: ReportedCpuset, now_ns: int) -> str:
    cpus = "no cpuset" if told.cpus is None else f"cpuset {told.cpus}"
    if not told.recorded_ns or not now_ns:
        return f"{told.source} says {cpus}"
    age_s = max(0, now_ns - told.recorded_ns) / 1e9
    return f"{told.source} says {cpus} since {age_s:.1f} s"


def _cpuset(container: Container) -> str:
    return f"cpuset {container.cpus}" if container.cpus else "no cpuset"


def _mask(placement: Placement) -> Iterator[str]:
    mask = placement.mask
    if mask.mask is None:
        yield f"none: {mask.origin}"
        return
    yield f"{mask.mask}: {mask.origin}"
    yield f"exclusive {_cpus(mask.exclusive)}, shared {_cpus(mask.shared)}"
    if mask.overhead_extra:
        yield (
            f"overhead and surplus vCPUs also {mask.overhead_extra}: the pod sandbox's own cpuset"
        )


def _exclusive(sandbox: Sandbox, placement: Placement) -> Iterator[str]:
    titles = {one.id: one.title for one in sandbox.containers}
    for claim in placement.mask.claims:
        known = "" if claim.provenance is Provenance.NONE else f" ({claim.provenance})"
        title = titles.get(claim.container_id, claim.container_id)  # it may have left meanwhile
        cpus = f"{claim.exclusive}{known}: " if claim.exclusive else ""
        yield f"{title}: {cpus}{claim.reason}{'' if claim.exclusive else known}"


def _size(threads: Iterable[Thread], placement: Placement, node: Node) -> Iterator[str]:
    vcpus = sum(one.role.role is ThreadRole.VCPU for one in threads)
    reserve = reserve_size(node.settings)
    pools = exclusive_pools(placement.mask, node.topology, reserve)
    if not vcpus:
        yield "no vCPU thread is known"
    elif not pools.exclusive:
        yield f"the VM has {vcpus} vCPUs; no container has exclusive CPUs"
    else:
        yield notes.size_text(vcpus, pools.size)
    if pools.reserved:
        yield f"{CpuSet(pools.reserved)} of the exclusive CPUs are reserved for overhead"


def _threads(
    sandbox: Sandbox, threads: Sequence[Thread], placement: Placement, node: Node
) -> Iterator[str]:
    guest = sandbox.vmm.guest if sandbox.vmm is not None else GuestTopology()
    near = vicinities(threads, placement, guest, node.topology)
    for thread in sorted(threads, key=_thread_order):
        head = f"tid {thread.key.tid} {thread.label} ({thread.role.source})"
        desired = placement.desired.get(thread.key)
        observed = thread.task.affinity
        if desired is None:
            yield f"{head}: left alone, now on {_cpus(observed)}"
            continue
        now = "" if observed == desired.applied else f", now on {_cpus(observed)}"
        yield (
            f"{head}: wanted {_cpus(desired.wanted)}, applied {_cpus(desired.applied)}{now}:"
            f" {desired.reason}{_near(near.get(thread.key, ''))}{_step(desired)}"
        )


def _near(text: str) -> str:
    return f" ({text})" if text else ""


def _step(desired: Desired) -> str:
    return f" [step {desired.step}]" if desired.step else ""


def _thread_order(thread: Thread) -> tuple[bool, int, str, int, int, int]:
    role, key = thread.role, thread.key
    index = -1 if role.vcpu is None else role.vcpu
    return (role.role is not ThreadRole.VCPU, index, role.role, key.tgid, key.tid, key.starttime)


def _cpus(cpus: CpuSet) -> str:
    return str(cpus) or "none"
