"""Why each thread of a sandbox may run on its CPUs, as lines for an operator.

A section's title is not indented, its lines are. Colours and widths are the command line's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import Node, Placement
from kata_pin.base.sandbox import GuestTopology, ReportedCpuset, Sandbox, Thread, Vmm
from kata_pin.base.values import Provenance, ThreadRole
from kata_pin.placement import notes
from kata_pin.placement.exclusive import exclusive_pools
from kata_pin.placement.masks import counted, why
from kata_pin.placement.notes import localities
from kata_pin.placement.pairing import reserve_size


def explain(
    sandbox: Sandbox,
    threads: Sequence[Thread],
    placement: Placement,
    node: Node,
    *,
    guest: Sequence[str] = (),
    now_ns: int = 0,
) -> tuple[str, ...]:
    """Return the lines, section by section; `guest` has those of guest/cpus.py.

    `now_ns` is CLOCK_BOOTTIME, for the ages of reported cpusets; 0 leaves the ages out.
    """
    lines = [f"sandbox {sandbox.id} ({sandbox.pod})"]
    for title, body in (
        ("VMM", _vmm(sandbox.vmm)),
        ("containers", _containers(sandbox, node, now_ns)),
        ("mask", _mask(placement)),
        ("exclusive", _exclusive(sandbox, placement)),
        ("VM size", _size(sandbox, threads, placement, node)),
        ("threads", _threads(sandbox, threads, placement, node)),
        *([("guest", guest)] if guest else []),
        ("notes", (f"{one.level}: {one.code}: {one.text}" for one in placement.notes)),
    ):
        lines.append(title)
        lines += [f"  {line}" for line in body] or ["  none"]
    return tuple(lines)


def _vmm(vmm: Vmm | None) -> Iterator[str]:
    if vmm is not None:
        yield f"pid {vmm.process.pid} ({vmm.exe}), confirmed by {vmm.witness}"
        for other in vmm.refused:
            yield f"not believed: {other}"


def _containers(sandbox: Sandbox, node: Node, now_ns: int) -> Iterator[str]:
    counting = {one.id for one in counted(sandbox, node)}
    for one in sandbox.containers:
        counts = "" if one.id in counting else ", does not count"
        source = one.source or "unknown"
        yield f"{one.title} ({one.kind}, {one.state}{counts}): {_cpuset(one.cpus)}, from {source}"
        if one.reported:
            values = "; ".join(_reported(each, now_ns) for each in one.reported)
            yield f"{one.title}: {values} ({why(one.reported)})"


def _reported(value: ReportedCpuset, now_ns: int) -> str:
    text = f"{value.source}: {_cpuset(value.cpus)}"
    if not value.recorded_ns or not now_ns:
        return text
    return f"{text}, for {max(0, now_ns - value.recorded_ns) / 1e9:.1f} s"


def _cpuset(cpus: CpuSet | None) -> str:
    return f"cpuset {cpus}" if cpus else "no cpuset"


def _mask(placement: Placement) -> Iterator[str]:
    mask = placement.mask
    if mask.mask is None:
        yield f"none: {mask.origin}"
        return
    yield f"{mask.mask}: {mask.origin}"
    yield f"exclusive {_cpus(mask.exclusive)}, shared {_cpus(mask.shared)}"
    if mask.overhead_extra:
        extra = mask.overhead_extra
        yield f"overhead threads and unpaired vCPUs also on {extra}: the pod sandbox's own cpuset"


def _exclusive(sandbox: Sandbox, placement: Placement) -> Iterator[str]:
    titles = {one.id: one.title for one in sandbox.containers}
    for claim in placement.mask.claims:
        known = "" if claim.provenance is Provenance.NONE else f" ({claim.provenance})"
        title = titles.get(claim.container_id, claim.container_id)  # it may have left meanwhile
        cpus = f"{claim.exclusive}{known}: " if claim.exclusive else ""
        yield f"{title}: {cpus}{claim.reason}{'' if claim.exclusive else known}"


def _size(
    sandbox: Sandbox, threads: Sequence[Thread], placement: Placement, node: Node
) -> Iterator[str]:
    vcpus = notes.VcpuCount(
        sum(one.role.role is ThreadRole.VCPU and not one.role.conflict for one in threads),
        sum(bool(one.role.conflict) for one in threads),
        sandbox.vmm,
    )
    pools = exclusive_pools(placement.mask, node.topology, reserve_size(node.settings))
    if not vcpus.most:
        yield "no vCPU threads found"
    elif not pools.exclusive:
        yield f"the VM has {vcpus}; no container has exclusive CPUs"
    else:
        yield notes.size_text(vcpus, pools.size)
        for row, lack in notes.remedies(vcpus.most, pools.size, sandbox.vmm):
            change = f"{row.path}: {row.content(lack).strip()!r}"
            yield f"remedy {row.name}: {change}; other pods: {row.others}; tried: {row.seen}"
    if pools.reserved:
        yield f"exclusive CPUs reserved for overhead: {CpuSet(pools.reserved)}"


def _threads(
    sandbox: Sandbox, threads: Sequence[Thread], placement: Placement, node: Node
) -> Iterator[str]:
    guest = sandbox.vmm.guest if sandbox.vmm is not None else GuestTopology()
    near = localities(threads, placement, guest, node.topology)
    for thread in sorted(threads, key=_thread_order):
        head = f"{thread.label} (tid {thread.key.tid}, source: {thread.role.source.text})"
        desired = placement.desired.get(thread.key)
        affinity = f"affinity {_cpus(thread.task.affinity)}"
        if desired is None:
            yield f"{head}: unmanaged, {affinity}"
            continue
        locality = f" ({near[thread.key]})" if near.get(thread.key) else ""
        if thread.task.affinity == desired.wanted:
            yield f"{head}: {affinity} as expected: {desired.reason}{locality}"
            continue
        step = f", fallback {_cpus(desired.applied)} ({desired.step})" if desired.step else ""
        yield (
            f"{head}: {affinity}, expected {_cpus(desired.wanted)}{step}:"
            f" {desired.reason}{locality}"
        )


def _thread_order(thread: Thread) -> tuple[bool, int, str, int, int, int]:
    role, key = thread.role, thread.key
    index = -1 if role.vcpu is None else role.vcpu
    return (role.role is not ThreadRole.VCPU, index, role.role, key.tgid, key.tid, key.starttime)


def _cpus(cpus: CpuSet) -> str:
    return str(cpus) or "none"
