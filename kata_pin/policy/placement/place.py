"""Where every thread of a sandbox should run: the whole decision of one pass.

Each step has a module: mask.py (which CPUs, D8), pools.py and pairing.py (vCPUs, D10), overhead.py
(everything else, D11), others.py (what other pods hold, D28), fallback.py (what the cgroup allows,
D7), isolation.py (isolated CPUs), release.py (no mask, D18), writers.py (Kata's own pinning, D13).
Nothing is remembered between passes: what should stay comes in as an argument. The order of
`threads` does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.node import Node
from kata_pin.model.placement import Desired, Note, Placement, SandboxMask
from kata_pin.model.sandbox import Sandbox
from kata_pin.model.steps import Steps, at_once
from kata_pin.model.thread import Role, Thread, ThreadKey, ThreadRole
from kata_pin.model.topology import HostTopology
from kata_pin.policy.placement import notes
from kata_pin.policy.placement.fallback import fit
from kata_pin.policy.placement.isolation import deal
from kata_pin.policy.placement.mask import sandbox_mask
from kata_pin.policy.placement.others import held_by_others, without
from kata_pin.policy.placement.overhead import OverheadHome, is_unmanaged, reserve_size
from kata_pin.policy.placement.pools import exclusive_pools
from kata_pin.policy.placement.release import release
from kata_pin.policy.placement.vcpus import VcpuScene, vcpu_wants
from kata_pin.policy.placement.want import Fit, Kind, Want
from kata_pin.policy.placement.writers import (
    NO_KATA_PINNING,
    KataPinning,
    KataPinningMode,
    kata_holds,
)


def place_in_steps(
    sandbox: Sandbox,
    threads: Sequence[Thread],
    node: Node,
    *,
    kept: Mapping[ThreadKey, int] | None = None,
    first_seen: Mapping[ThreadRole, CpuSet] | None = None,
    allocated: Mapping[str, CpuSet] | None = None,
    pool: CpuSet = EMPTY,
    others: CpuSet = EMPTY,
    kata: KataPinning = NO_KATA_PINNING,
) -> Steps[Placement]:
    """Return the placement of all threads of the sandbox.

    `threads` are all of the sandbox, in any order. `kept` maps vCPU threads to the pCPU of their
    last pair (`pairs` of the placement before, from the registry); `first_seen` maps roles to
    their mask before the first pin. `allocated`, `pool` and `others` (what other sandboxes have
    exclusively) come from our own allocator. `kata` says what Kata's configuration does to vCPU
    affinity. Without a mask every thread is released.
    """
    paired = CpuSet((kept or {}).values())
    whole = sandbox_mask(sandbox, node, allocated=allocated, pool=pool, kept=paired)
    every = _unique(threads)
    yield
    if whole.mask is None:
        return release(sandbox.id, every, node, first_seen=first_seen, mask=whole)
    taken = held_by_others(sandbox.containers, whole.claims, node, others)
    mask = without(whole, taken)
    pools = exclusive_pools(mask, node.topology, reserve_size(node.settings))
    home = OverheadHome(mask, pools.reserved, node)
    parts = _split(every)
    scene = VcpuScene(sandbox, node, mask, pools, home, kept or {}, len(parts.disputed))
    wants: list[Want] = []
    said: list[Note] = []
    yields = kata_holds(kata.mode, parts.vcpu_count, whole)
    if yields:
        said.append(notes.kata_pins_vcpus(kata.evidence))
    else:
        wants, said = vcpu_wants(parts.vcpus, scene)
        if kata.mode is not KataPinningMode.OFF:
            said = [*said, notes.kata_may_pin(kata.evidence, parts.vcpu_count)]
    disputed = list(_disputed_wants(parts.disputed, mask, node, yields=yields))
    wants += disputed
    said += _dispute_notes(disputed)
    wants += home.wants(parts.others)
    yield
    fits, obstacles = fit(wants, mask, CpuSet(pools.reserved), node.topology.online, taken)
    yield
    dealt = deal(fits, node.topology)
    said += [*obstacles, *_overlap_notes(dealt), *_notes_on_others(whole, dealt, taken)]
    yield
    return Placement(
        sandbox.id, mask, {one.want.thread.key: _desired(one) for one in dealt}, tuple(said)
    )


place = at_once(place_in_steps)


def relevant(
    threads: Iterable[Thread], topology: HostTopology
) -> list[tuple[ThreadKey, Role, str, CpuSet, CpuSet | None]]:
    """Return what `place` goes by of each thread: the same threads have the same placement.

    An affinity counts where it is one CPU that the thread may stay on: that of a vCPU (also one
    with a pair, which may be lost), and of any thread while there are isolated CPUs.
    """
    isolated = bool(topology.isolated)
    return [
        (
            task.key,
            role,
            task.cgroup,
            task.cpuset,
            task.affinity
            if (isolated or role.role is ThreadRole.VCPU) and len(task.affinity) == 1
            else None,
        )
        for task, role in threads
    ]


def pairs(placement: Placement) -> dict[ThreadKey, int]:
    """Return what `place` takes as `kept` in the next pass: one CPU of each vCPU's run.

    A vCPU keeps its run even while its cgroup does not allow it.
    """
    return {key: one.wanted.first for key, one in placement.desired.items() if one.container_id}


class _Parts(NamedTuple):
    """The threads of a sandbox by how their place is decided; disputed ones with the reason."""

    vcpus: list[Thread]
    disputed: list[tuple[Thread, str]]
    others: list[Thread]

    @property
    def vcpu_count(self) -> int:
        contested = sum(one.role.role is ThreadRole.VCPU for one, _why in self.disputed)
        return len(self.vcpus) + contested


def _unique(threads: Iterable[Thread]) -> list[Thread]:
    """Return the threads in the order of their keys, each once."""

    def order(thread: Thread) -> tuple[ThreadKey, str, int]:
        role = thread.role
        return (thread.task.key, role.role, -1 if role.vcpu is None else role.vcpu)

    return list({thread.key: thread for thread in sorted(threads, key=order)}.values())


def _split(threads: Iterable[Thread]) -> _Parts:
    """Separate threads whose role is disputed: by sources, or as two have one vCPU index."""
    parts = _Parts([], [], [])
    by_index: dict[int | None, list[Thread]] = {}
    for thread in threads:
        if thread.role.conflict:
            parts.disputed.append((thread, thread.role.conflict))
        elif thread.role.role is ThreadRole.VCPU:
            by_index.setdefault(thread.role.vcpu, []).append(thread)
        else:
            parts.others.append(thread)
    for index, group in by_index.items():
        if index is None or len(group) == 1:
            parts.vcpus.extend(group)
        else:
            why = f"several threads claim to be vCPU {index}"
            parts.disputed.extend((thread, why) for thread in group)
    return parts


def _disputed_wants(
    disputed: Iterable[tuple[Thread, str]], mask: SandboxMask, node: Node, *, yields: bool
) -> Iterator[Want]:
    """Put threads of disputed role on the whole mask (D6), unless they are unmanaged."""
    for thread, why in disputed:
        role = thread.role.role
        kata_does = yields and role is ThreadRole.VCPU
        if not kata_does and not is_unmanaged(role, node.settings):
            yield Want(thread, mask.mask or EMPTY, Kind.DISPUTED, why)


def _dispute_notes(wants: Iterable[Want]) -> Iterator[Note]:
    tids: dict[str, list[int]] = {}
    for want in wants:
        tids.setdefault(want.reason, []).append(want.thread.key.tid)
    return (notes.role_conflict(group, why) for why, group in tids.items())


def _overlap_notes(fits: Sequence[Fit]) -> Iterator[Note]:
    paired = union(one.applied for one in fits if one.paired)
    for kind, note in (
        (Kind.SURPLUS, notes.surplus_overlaps_pairs),
        (Kind.OVERHEAD, notes.overhead_overlaps_pairs),
    ):
        there = [one for one in fits if one.want.kind is kind and one.applied & paired]
        if there:
            yield note(len(there), union(one.applied for one in there) & paired)


def _notes_on_others(mask: SandboxMask, fits: Sequence[Fit], taken: CpuSet) -> Iterator[Note]:
    lost = ((mask.mask or EMPTY) | mask.overhead_extra) & taken
    if lost:
        yield notes.held_by_others(lost)
    there = [one for one in fits if one.applied & taken]
    if there:
        yield notes.runs_on_others(len(there), union(one.applied for one in there) & taken)


def _desired(one: Fit) -> Desired:
    want = one.want
    return Desired(
        key=want.thread.task.key,
        wanted=want.cpus,
        applied=one.applied,
        reason=f"{want.reason}; {one.detail}" if one.detail else want.reason,
        step=one.step,
        paired=one.paired,
        container_id=want.container_id,
    )
