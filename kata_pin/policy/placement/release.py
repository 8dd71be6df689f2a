"""Restoring the affinities that threads had before kata-pin pinned them (D18).

Each thread gets the affinity first seen for its role, else that of pid 1: all CPUs would be wrong
on hosts with isolated CPUs. Threads that the settings do not manage are not restored either: their
affinities may be Kata's own. The caller knows whether a sandbox was ever pinned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.node import Node
from kata_pin.model.placement import Action, Desired, Placement, SandboxMask
from kata_pin.model.thread import Thread, ThreadKey, ThreadRole
from kata_pin.policy.placement import notes
from kata_pin.policy.placement.fallback import within
from kata_pin.policy.placement.overhead import is_unmanaged


def release(
    sandbox_id: str,
    threads: Iterable[Thread],
    node: Node,
    *,
    first_seen: Mapping[ThreadRole, CpuSet] | None = None,
    mask: SandboxMask | None = None,
) -> Placement:
    """Return the placement that restores every affinity of the sandbox.

    `first_seen` is the mask of each role before the first pin (registry). Applied is that mask ∩
    the thread's cpuset ∩ online; when empty the cpuset, then whatever is online.
    """
    known = first_seen or {}
    gone = mask or SandboxMask(mask=None, origin="released on request")
    desired = {
        thread.key: _given_back(thread, known.get(thread.role.role), node)
        for thread in threads
        if not is_unmanaged(thread.role.role, node.settings)
    }
    return Placement(sandbox_id, gone, desired, (notes.released(gone.origin),))


def undo(
    placement: Placement, threads: Iterable[Thread], *, skip: Collection[ThreadKey] = ()
) -> tuple[Action, ...]:
    """Return the actions that restore affinities: one for each thread, however right it looks.

    From Linux 6.2 on a pin can be hidden by a cpuset of the same CPUs, and would cut that cpuset
    when it grows. So the whole mask is asked for, not only what of it the cpuset allows. Threads
    that are gone, or are among `skip` (another writer moves them, D13), get none.
    """
    seen = {thread.key: thread.task.affinity for thread in threads}
    return tuple(
        Action(
            key,
            desired.applied,
            seen[key],
            desired.reason,
            ask=EMPTY if desired.step else desired.wanted,
        )
        for key, desired in placement.desired.items()
        if key in seen and key not in skip and desired.applied
    )


def _given_back(thread: Thread, first_seen: CpuSet | None, node: Node) -> Desired:
    if first_seen:
        wanted, reason = first_seen, "released: affinity before the first pin"
    else:
        wanted, reason = node.release_mask, "released: affinity of pid 1"
    applied, step = within(wanted, thread.task.cpuset, node.topology.online)
    return Desired(thread.key, wanted, applied, reason, step=step, release=True)
