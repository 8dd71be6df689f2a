"""How observed affinities differ from the desired ones.

Where Kata pins vCPUs itself, these are left to Kata (D13).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.placement import (
    Action,
    Desired,
    Drift,
    DriftKind,
    KubeletState,
    Placement,
    SandboxMask,
)
from kata_pin.base.sandbox import Task, Thread
from kata_pin.base.threads import ThreadKey
from kata_pin.placement.masks import Want, WantKind

# Observed is what the kernel shows now, never what was last written (D2).
#
# A thread on a part of the CPUs it should have is no drift: it runs where it may. Something else
# narrowed it (a cpuset that cannot be read, Kata, the VMM itself), unless kata-pin is about to give
# it more. It is set once, and then left (`narrowed`).


def find_drift(
    placement: Placement,
    threads: Iterable[Thread],
    *,
    known: Collection[ThreadKey] | None = None,
    before: Mapping[ThreadKey, Desired] | None = None,
    backed_off: Collection[ThreadKey] = (),
) -> tuple[Drift, ...]:
    """Return one drift for each thread that may run off its CPUs, in the order of keys.

    A desired thread that is not among `threads` is THREAD_GONE. `known` are the threads of the
    pass before: one that is not among them and is off is THREAD_NEW (None: all were known).
    `before` is what was desired then: where that was something else it is PLACEMENT_CHANGED (None:
    it was the same). `backed_off` are those that another writer keeps moving: their drift is
    OTHER_WRITER (D13).
    """
    tasks = {task.key: task for task, _role in threads}
    drifts: list[Drift] = []
    for key, desired in placement.desired.items():
        task = tasks.get(key)
        if task is None:
            drifts.append(Drift(key, DriftKind.THREAD_GONE, desired.applied, EMPTY))
        elif task.affinity != desired.applied and not is_narrower(task, desired):
            new = known is not None and key not in known
            past = desired if before is None else before.get(key)
            changed = past is None or past.applied != desired.applied
            kind = _kind(desired, task, new=new, changed=changed, others=key in backed_off)
            drifts.append(Drift(key, kind, desired.applied, task.affinity))
    return tuple(sorted(drifts))  # by key, of which each has another


def is_narrower(task: Task, desired: Desired) -> bool:
    """Whether a thread runs on a part of its CPUs; not while its former affinity is restored."""
    return not desired.release and task.affinity < desired.applied


def narrowed(
    placement: Placement, threads: Iterable[Thread], asked: Mapping[ThreadKey, CpuSet]
) -> frozenset[ThreadKey]:
    """Return the threads on a part of their CPUs that were given all of them before.

    `asked` maps threads to what they were last set to. To set them again would change nothing.
    """
    if not asked:
        return frozenset()
    return frozenset(
        task.key
        for task, _role in threads
        if (desired := placement.desired.get(task.key)) is not None
        and is_narrower(task, desired)
        and asked.get(task.key) == desired.applied
    )


def _kind(desired: Desired, task: Task, *, new: bool, changed: bool, others: bool) -> DriftKind:
    if others:
        return DriftKind.OTHER_WRITER
    if new:
        return DriftKind.THREAD_NEW
    if desired.step or (task.cpuset and not desired.applied <= task.cpuset):
        return DriftKind.CPUSET_SHRUNK
    if changed:
        return DriftKind.PLACEMENT_CHANGED
    if task.affinity > desired.applied:
        return DriftKind.WIDENED
    if task.affinity < desired.applied:
        return DriftKind.NARROWED
    return DriftKind.MOVED


def make_plan(
    placement: Placement, threads: Iterable[Thread], *, skip: Collection[ThreadKey] = ()
) -> tuple[Action, ...]:
    """Return the actions for threads that differ: first those that widen, then moves, then narrow.

    Applied to the same observation they leave no drift, and a second plan is empty. Threads that
    are gone, that nothing is desired for, or that are `skip` (another writer keeps them,
    D13) get none. Two observations of one thread give one action.
    """
    actions: dict[ThreadKey, Action] = {}
    for task, _role in threads:
        key, observed = task.key, task.affinity
        desired = placement.desired.get(key)
        if desired is None or not desired.applied or desired.applied == observed:
            continue
        if key not in skip:
            actions[key] = Action(key, desired.applied, observed, desired.reason)
    return tuple(sorted(actions.values(), key=_order))


def _order(action: Action) -> tuple[int, ThreadKey]:
    before, target = action.before, action.target
    if before <= target:  # they differ
        return 0, action.key
    return 2 if target <= before else 1, action.key


# Other writers of affinities: when Kata's own pinning is left to do the vCPUs (D13).


class KataPinningMode(StrEnum):
    """What the handler's Kata configuration makes of vCPU affinity."""

    OFF = "off"
    COUNT = "count"  # enable_vcpus_pinning: acts while vCPUs and CPUs of the union are as many
    NUMA = "numa"  # enable_vcpus_pinning with enable_numa: acts always


class KataPinning(Struct, frozen=True):
    """What Kata's configuration makes of one sandbox's vCPUs, and what says so; empty: nothing.

    `written` is the cpuset that Kata wrote to the sandbox's cgroup, EMPTY where none is known.
    """

    mode: KataPinningMode = KataPinningMode.OFF
    evidence: str = ""
    written: CpuSet = EMPTY


NO_KATA_PINNING: Final = KataPinning()


def kata_holds(kata: KataPinning, vcpus: int, mask: SandboxMask) -> bool:
    """Return whether Kata's own rule holds, so that kata-pin must not overwrite its pins."""
    return kata.mode is KataPinningMode.NUMA or bool(_counted_union(kata, vcpus, mask))


def hand_over(kata: KataPinning, vcpus: Iterable[Thread], mask: SandboxMask) -> list[Want]:
    """Return what puts vCPUs that kata-pin had set on Kata's own pins, once its rule holds.

    A pass that began before Kata wrote a cpuset may end after Kata has pinned, and Kata does not
    pin again. So vCPUs count as kata-pin's until a pass finds all of them on Kata's pins.
    """
    by_index = {thread.role.vcpu: thread for thread in vcpus if thread.role.vcpu is not None}
    union = _counted_union(kata, len(by_index), mask)
    # Go goes by cpu-index: the position too, until it has hotplugged a vCPU and its shim dies of it
    pins = zip(sorted(by_index), union, strict=False)
    return [
        Want(thread, cpu, WantKind.KATA, "Kata's own pin, which a pass had overwritten")
        for thread, cpu in ((by_index[index], CpuSet((number,))) for index, number in pins)
        if thread.task.affinity != cpu
    ]


def _counted_union(kata: KataPinning, vcpus: int, mask: SandboxMask) -> CpuSet:
    """Return the union over Kata's containers if it has as many CPUs as there are vCPUs.

    Kata compares the number of vCPU threads with the union over all its containers, the pod
    sandbox's own cpuset included (virtcontainers sandbox.go, checkVCPUsPinning; runtime-rs,
    resource_inner.rs). It writes that union to the cgroup before it pins, and only afterwards do
    NRI and persist.json report the containers: so the records count where nothing is written.
    """
    if kata.mode is not KataPinningMode.COUNT:
        return EMPTY
    union = kata.written or (mask.mask or EMPTY) | mask.overhead_extra
    return union if len(union) == vcpus else EMPTY


# What a new checkpoint of the kubelet changes: which pods have other CPUs than before.


def touched(before: KubeletState | None, now: KubeletState | None) -> tuple[frozenset[str], bool]:
    """Return the uids of the pods whose assignments differ, and whether all others may differ too.

    Others may where the policy or the default set is another: that is what every container has that
    is not in the checkpoint.
    """
    if before is None or now is None:
        one = before or now
        uids = one.entries.keys() | one.pod_entries.keys() if one is not None else frozenset()
        return frozenset(uids), before is not now
    pods = {
        uid
        for old, new in ((before.entries, now.entries), (before.pod_entries, now.pod_entries))
        for uid in old.keys() | new.keys()
        if old.get(uid) != new.get(uid)
    }
    return frozenset(pods), (before.policy, before.default) != (now.policy, now.default)
