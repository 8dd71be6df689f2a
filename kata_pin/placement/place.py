"""Where every thread of a sandbox should run: the whole decision of one pass.

Its fallbacks (D7), and what a release restores (D18), are here too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.placement import Action, Binding, Desired, Node, Note, Placement, SandboxMask
from kata_pin.base.sandbox import Role, Sandbox, Task, Thread
from kata_pin.base.steps import Steps
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import ContainerKind, NoteLevel, ThreadRole, count
from kata_pin.placement import notes
from kata_pin.placement.drift import (
    NO_KATA_PINNING,
    KataPinning,
    KataPinningMode,
    hand_over,
    kata_holds,
)
from kata_pin.placement.exclusive import exclusive_pools, held_by_others, unclaimed, without
from kata_pin.placement.masks import Fit, Want, WantKind, counted, deal, sandbox_mask
from kata_pin.placement.pairing import (
    Scene,
    around,
    is_unmanaged,
    redirected,
    reserve_size,
    vcpu_wants,
)
from kata_pin.placement.pairing import obstacle as pairing_obstacle
from kata_pin.placement.pairing import wants as bound_wants

# What can be applied of what is wanted, and what is applied instead when nothing can (D7).
#
# Applied is wanted ∩ the cpuset of the thread's cgroup ∩ online. When that is empty the next of
# these that is not: the sandbox's shared CPUs, its reserve CPUs, the CPUs of surplus or shared
# vCPUs, the cpuset, and where even that is off (a stale reading), whatever is online. Of the cpuset
# it is the sandbox's part while there is one: until Kata narrows a cgroup, CPUs that the sandbox
# gave up are in it, and may belong to another sandbox by then. CPUs that other pods hold
# exclusively (D28) are left out of every step, unless a thread's cpuset has no others. An empty
# Task.cpuset means that the cgroup could not be read; then only the online CPUs limit.


class Step(StrEnum):
    """The fallbacks in their order; NONE when the want was met."""

    NONE = ""
    SHARED = "shared"
    RESERVE = "reserve"
    SURPLUS = "surplus"
    CPUSET = "cpuset"
    ONLINE = "online"


_INSTEAD: Final = {
    Step.SHARED: "the sandbox's shared CPUs",
    Step.RESERVE: "the sandbox's reserve CPUs",
    Step.SURPLUS: "the CPUs of unpaired vCPUs",
    Step.CPUSET: "the cgroup's cpuset",
    Step.ONLINE: "all online CPUs",
}


def fit(
    wants: Iterable[Want],
    mask: SandboxMask,
    reserve: CpuSet,
    online: CpuSet,
    others: CpuSet = EMPTY,
) -> tuple[list[Fit], list[Note]]:
    """Fit every want to its thread's cpuset; a note for each kind of obstacle met.

    `others` are the CPUs that other pods hold exclusively.
    """
    every = list(wants)
    surplus = union(want.cpus for want in every if want.kind.vcpu_for_all)
    extra = mask.overhead_extra
    # CPUs of the pod sandbox's own cpuset are never for a vCPU that is paired
    whole = mask.mask or EMPTY
    steps = (mask.shared, reserve, surplus - extra, whole - extra)
    paired = _Fitter(online, steps, others)
    other = _Fitter(online, (mask.shared | extra, reserve, surplus, whole), others)
    fits = [(paired if want.kind is WantKind.PAIRED else other).fit(want) for want in every]
    return fits, list(_fallback_notes(fits))


def within(
    wanted: CpuSet,
    cpuset: CpuSet,
    online: CpuSet,
    steps: Iterable[tuple[Step, CpuSet]] = (),
    others: CpuSet = EMPTY,
) -> tuple[CpuSet, Step]:
    """Return what of `wanted` can be applied, else what the first useful step offers.

    Where nothing is left but the cpuset, the rest of it is preferred to CPUs of `others`.
    """
    allowed = cpuset & online if cpuset else online
    for step, cpus in ((Step.NONE, wanted), *steps):
        if cpus & allowed:
            return cpus & allowed, step
    if cpuset and allowed:
        return allowed - others or allowed, Step.CPUSET
    return online - others or online, Step.ONLINE


class _Fitter:
    """Fits wants; `steps` are the CPUs of SHARED, RESERVE, SURPLUS and CPUSET."""

    def __init__(self, online: CpuSet, steps: Iterable[CpuSet], others: CpuSet) -> None:
        self._online = online
        self._others = others
        names = (Step.SHARED, Step.RESERVE, Step.SURPLUS, Step.CPUSET)
        self._steps = [(name, cpus - others) for name, cpus in zip(names, steps, strict=True)]
        self._known: dict[tuple[int, int], tuple[CpuSet, Step]] = {}

    def fit(self, want: Want) -> Fit:
        cpuset = want.thread.task.cpuset
        key = (want.cpus.bits, cpuset.bits)
        found = self._known.get(key)
        if found is None:
            free = want.cpus - self._others
            found = within(free, cpuset, self._online, self._steps, self._others)
            self._known[key] = found
        applied, step = found
        if step:
            return Fit(want, applied, step, self._obstacle(want))
        return Fit(want._replace(cpus=want.cpus - self._others), applied)

    def _obstacle(self, want: Want) -> str:
        if not want.cpus:
            return "no CPUs are set"
        if not want.cpus & self._online:
            return "those CPUs are offline"
        if want.cpus <= self._others:
            return "other pods hold those CPUs exclusively"
        return f"cgroup {want.thread.task.cgroup} allows only {want.thread.task.cpuset}"


def _fallback_notes(fits: Iterable[Fit]) -> Iterable[Note]:
    counts: dict[tuple[str, str, str], tuple[int, CpuSet]] = {}
    for one in fits:
        if one.step:
            key = (one.want.kind.value, one.step, one.detail)
            number, wanted = counts.get(key, (0, EMPTY))
            counts[key] = (number + 1, wanted | one.want.cpus)
    for (_kind, step, obstacle), (number, wanted) in counts.items():
        threads, instead = count(number, "thread"), _INSTEAD[Step(step)]
        yield notes.note(
            "fallback", threads=threads, wanted=wanted or "no CPU", obstacle=obstacle, step=instead
        )


# Restoring the affinities that threads had before kata-pin pinned them (D18).
#
# Each thread gets the affinity first seen for its role, else that of pid 1: all CPUs would be wrong
# on hosts with isolated CPUs. Threads that the settings do not manage are not restored either:
# their affinities may be Kata's own. The caller knows whether a sandbox was ever pinned.

ON_REQUEST: Final = "released on request"


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
    gone = mask or SandboxMask(mask=None, origin=ON_REQUEST)
    desired = {
        thread.key: _given_back(thread, known.get(thread.role.role), node)
        for thread in threads
        if not is_unmanaged(thread.role.role, node.settings)
    }
    return Placement(sandbox_id, gone, desired, (notes.note("released", origin=gone.origin),))


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
    return Desired(wanted, applied, reason, step=step, release=True)


# The steps: which CPUs (masks.py, D8), vCPUs (exclusive.py and pairing.py, D10), everything else
# (pairing.py, D11), what other pods hold (exclusive.py, D28), what the cgroup allows (here, D7),
# isolated CPUs (masks.py), no mask (here, D18), Kata's own pinning (drift.py, D13). Nothing is
# remembered between passes: what should stay comes in as an argument. The order of `threads` does
# not matter.


def place(
    sandbox: Sandbox,
    threads: Sequence[Thread],
    node: Node,
    *,
    kept: Mapping[ThreadKey, int] | None = None,
    first_seen: Mapping[ThreadRole, CpuSet] | None = None,
    allocated: Mapping[str, CpuSet] | None = None,
    pool: CpuSet = EMPTY,
    others: CpuSet = EMPTY,
    beside: CpuSet = EMPTY,
    kata: KataPinning = NO_KATA_PINNING,
    released: bool = False,
    binding: Binding | None = None,
) -> Steps[Placement]:
    """Return the placement of all threads of the sandbox.

    `threads` are all of the sandbox, in any order. `kept` maps vCPU threads to the pCPU of their
    last pair (`pairs` of the placement before, from the registry); `first_seen` maps roles to
    their mask before the first pin. `allocated`, `pool` and `others` (what other sandboxes have
    exclusively) come from our own allocator; `beside` is what they have exclusively by any source,
    for a sandbox without a cpuset. `kata` says what Kata's configuration does to vCPU
    affinity. `binding` is what an administrator named. Without a mask, or if the sandbox is
    `released`, every thread is released but the vCPUs that Kata pins.
    """
    paired = CpuSet((kept or {}).values())
    whole = sandbox_mask(sandbox, node, allocated=allocated, pool=pool, kept=paired)
    parts = _split(_unique(threads))
    yields = kata_holds(kata, parts.vcpu_count, whole)
    yield
    taken = held_by_others(sandbox.containers, whole.claims, node, others)
    if not released:
        whole = unclaimed(whole, node, taken | beside)
    ours_too = ThreadRole.VCPU in (first_seen or {})  # kata-pin set them, too
    katas = hand_over(kata, parts.vcpus, whole) if yields and ours_too else []
    if released or whole.mask is None:
        threads, gone = parts.without_vcpus if yields else parts.every, None if released else whole
        found = release(sandbox.id, threads, node, first_seen=first_seen, mask=gone)
        return _with_katas_pins(found, kata, katas) if yields else found
    mask = without(whole, taken)
    binding, unbound = _usable(binding, parts, node, taken | beside, yields=yields)
    around_it = mask if binding is None else around(binding, mask)
    pools = exclusive_pools(around_it, node.topology, reserve_size(node.settings))
    scene = Scene(sandbox, node, around_it, pools, kept or {}, len(parts.disputed))
    if yields:
        wants, said = katas, [_left_to_kata(sandbox, node, kata, alone=not pools.exclusive)]
    else:
        wants, said = _vcpus(binding, parts.vcpus, scene, mask)
        if kata.mode is not KataPinningMode.OFF:
            said.append(notes.note("kata-may-pin", evidence=kata.evidence, vcpus=parts.vcpu_count))
    disputed = list(_disputed_wants(parts.disputed, mask, node, yields=yields))
    wants = list(redirected(binding, [*wants, *disputed, *scene.overhead(parts.others)]))
    said += _dispute_notes(disputed)
    yield
    fits, obstacles = fit(wants, mask, CpuSet(pools.reserved), node.topology.online, taken)
    yield
    dealt = deal(fits, node.topology)
    said += [*obstacles, *_overlap_notes(dealt), *_notes_on_others(whole, dealt, taken)]
    yield
    return Placement(sandbox.id, mask, _shared(dealt), tuple(said), binding, unbound)


def _vcpus(
    binding: Binding | None, vcpus: Sequence[Thread], scene: Scene, mask: SandboxMask
) -> tuple[list[Want], list[Note]]:
    """Return the wants of vCPUs: what an administrator named, and the policy's for the others."""
    if binding is None:
        return vcpu_wants(vcpus, scene)
    bound = list(bound_wants(binding, vcpus, mask))
    named = {one.thread.key for one in bound}
    wants, said = vcpu_wants([one for one in vcpus if one.key not in named], scene)
    return [*wants, *bound], [*said, notes.note("bound", binding=binding)]


def _usable(
    binding: Binding | None, parts: _Parts, node: Node, taken: CpuSet, *, yields: bool
) -> tuple[Binding | None, str]:
    """Return the binding if it can be applied whole; else nothing, and why not."""
    if binding is None:
        return None, ""
    managed = [one for one in parts.others if not is_unmanaged(one.role.role, node.settings)]
    vcpus = [*parts.vcpus, *(one for one, _why in parts.disputed)]
    why = "Kata pins the vCPUs" if yields else ""
    why = why or pairing_obstacle(binding, [*vcpus, *managed], node.topology.online, taken)
    return (None, why) if why else (binding, "")


def _left_to_kata(sandbox: Sandbox, node: Node, kata: KataPinning, *, alone: bool) -> Note:
    """Return the note that Kata pins the vCPUs; it names the containers that share all of them."""
    inside = () if alone else counted(sandbox, node)
    titles = [one.title for one in inside if one.kind is ContainerKind.CONTAINER]
    return notes.kata_pins_vcpus(kata.evidence, titles)


def _with_katas_pins(released: Placement, kata: KataPinning, wants: Sequence[Want]) -> Placement:
    """Return a release that leaves the vCPUs to Kata; `wants` are pins of Kata that were lost."""
    pins = {
        want.thread.key: replace(_desired(Fit(want, want.cpus)), release=True) for want in wants
    }
    said = (*released.notes, notes.kata_pins_vcpus(kata.evidence))
    return replace(released, desired={**released.desired, **pins}, notes=said)


def are_placed_alike(
    before: Sequence[Thread],
    threads: Sequence[Thread],
    topology: HostTopology,
    found: Placement,
    kept: Mapping[ThreadKey, int],
) -> bool:
    """Whether `place` has the same answer for these threads as for those before, in this order.

    `found` is that answer, with these pairs kept. An affinity counts where it is one CPU that the
    thread may stay on: that of any thread while there are isolated CPUs, and that of a vCPU unless
    each run was kept for the vCPU that has it: then none is left to give by what is observed.
    """
    if before == threads:
        return True
    counting = frozenset[ThreadRole]()
    if topology.isolated:
        counting = frozenset(ThreadRole)
    elif not _all_kept(found, kept):
        counting = frozenset({ThreadRole.VCPU})
    return _relevant(before, counting) == _relevant(threads, counting)


def _all_kept(found: Placement, kept: Mapping[ThreadKey, int]) -> bool:
    """Whether there are runs, and each is the one in which its vCPU's kept CPU is."""
    given = pairs(found)
    return bool(given) and all(kept.get(key) in found.desired[key].wanted for key in given)


def _relevant(
    threads: Iterable[Thread], counting: Collection[ThreadRole]
) -> list[tuple[ThreadKey, Role, str, CpuSet, CpuSet | None]]:
    """Return what `place` goes by of each thread: the same threads have the same placement.

    `counting` are the roles whose affinity may count.
    """
    return [
        (
            task.key,
            role,
            task.cgroup,
            task.cpuset,
            task.affinity if role.role in counting and len(task.affinity) == 1 else None,
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

    @property
    def every(self) -> list[Thread]:
        return [*self.vcpus, *(one for one, _why in self.disputed), *self.others]

    @property
    def without_vcpus(self) -> list[Thread]:
        return [one for one in self.every if one.role.role is not ThreadRole.VCPU]


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
            yield Want(thread, mask.mask or EMPTY, WantKind.DISPUTED, why)


def _dispute_notes(wants: Iterable[Want]) -> Iterator[Note]:
    tids: dict[str, list[int]] = {}
    for want in wants:
        tids.setdefault(want.reason, []).append(want.thread.key.tid)
    return (
        notes.note("role-conflict", tids=notes.tids(group), why=why) for why, group in tids.items()
    )


def _overlap_notes(fits: Sequence[Fit]) -> Iterator[Note]:
    paired = union(one.applied for one in fits if one.paired)
    for kind, code, word in (
        (WantKind.SURPLUS, "surplus-overlaps-pairs", "unpaired vCPU"),
        (WantKind.OVERHEAD, "overhead-overlaps-pairs", "thread"),
    ):
        there = [one for one in fits if one.want.kind is kind and one.applied & paired]
        if there:
            cpus = union(one.applied for one in there) & paired
            yield notes.note(code, threads=count(len(there), word), cpus=cpus)


def _notes_on_others(mask: SandboxMask, fits: Sequence[Fit], taken: CpuSet) -> Iterator[Note]:
    lost = ((mask.mask or EMPTY) | mask.overhead_extra) & taken
    if lost:
        yield notes.note("held-by-others", cpus=lost)
    there = [one for one in fits if one.applied & taken]
    if there:
        threads, cpus = count(len(there), "thread"), union(one.applied for one in there) & taken
        yield notes.note(notes.RUNS_ON_OTHERS, threads=threads, cpus=cpus)


def _shared(fits: Iterable[Fit]) -> dict[ThreadKey, Desired]:
    """Return where each thread should run, one object for those that should run alike."""
    alike: dict[Desired, Desired] = {}
    made = ((one.want.thread.key, _desired(one)) for one in fits)
    return {key: alike.setdefault(one, one) for key, one in made}


def _desired(one: Fit) -> Desired:
    want = one.want
    return Desired(
        wanted=want.cpus,
        applied=one.applied,
        reason=f"{want.reason}; {one.detail}" if one.detail else want.reason,
        step=one.step,
        paired=one.paired,
        container_id=want.container_id,
    )


# What `pin` may set without the daemon: no thread gains an exclusive pCPU (D19).
#
# Such a pass knows less: no events, no QMP, no NRI, only what is stored and what the kubelet's
# checkpoint says. So it gives no thread an exclusive pCPU that another pod, or a vCPU of its own
# sandbox, has. Where it cannot know it leaves the thread on what it has, and says so. A vCPU gets
# its own pCPU.


class OthersCpus(Struct, frozen=True):
    """The exclusive CPUs of all other sandboxes and pods, as far as they are known.

    `unknown` says what is missing: no thread gets any CPU then that it does not have.
    """

    exclusive: CpuSet = EMPTY
    unknown: str = ""


def without_gains(
    placement: Placement,
    threads: Iterable[Thread],
    pairs: Mapping[ThreadKey, int],
    others: OthersCpus,
) -> tuple[Placement, tuple[Note, ...]]:
    """Return the placement without exclusive CPUs that threads do not have, and what to say of it.

    `pairs` are the stored ones: a vCPU that is not recognised now stays on its pCPU.
    """
    desired = dict(placement.desired)
    kept, refused = 0, EMPTY
    for task, _role in threads:
        wanted, pair = desired.get(task.key), pairs.get(task.key)
        if _is_lost(wanted, pair, task, placement):
            assert pair is not None
            desired[task.key] = _as_it_is(task, pair, placement)
            kept += 1
        elif wanted is not None and (gain := _gain(wanted, pair, task, placement, others)):
            applied = wanted.applied - gain or task.affinity
            why = f"{wanted.reason}; without the daemon not on {gain}"
            kept_to = applied if wanted.release else wanted.wanted  # an undo sets what is wanted
            desired[task.key] = replace(wanted, wanted=kept_to, applied=applied, reason=why)
            refused |= gain
            kept += 1
    if not kept:
        return placement, ()
    why = others.unknown or f"pCPUs {refused} are exclusive" if refused else "they are vCPUs"
    text = f"{count(kept, 'thread')} kept off pCPUs that the daemon may give: {why}"
    note = Note("offline-narrow", text, NoteLevel.WARNING)
    return replace(placement, desired=desired), (note,)


def _is_lost(wanted: Desired | None, pair: int | None, task: Task, placement: Placement) -> bool:
    """Whether a thread is stored as a vCPU with a pCPU, and this pass takes it for another."""
    if pair is None or (wanted is not None and (wanted.paired or wanted.release)):
        return False
    return pair in placement.mask.exclusive and pair in task.affinity


def _as_it_is(task: Task, pair: int, placement: Placement) -> Desired:
    cpu = CpuSet((pair,))
    owner = next((one for one in placement.mask.claims if cpu <= one.exclusive), None)
    return Desired(
        cpu,
        task.affinity,
        "left on its pCPU: stored as a vCPU, not recognised without the daemon",
        container_id=owner.container_id if owner is not None else "",
    )


def _gain(
    wanted: Desired, pair: int | None, task: Task, placement: Placement, others: OthersCpus
) -> CpuSet:
    """Return the CPUs that a thread must not get, of those that it would get."""
    new = wanted.applied - task.affinity
    stored = union([CpuSet((pair,))] if pair is not None else [])
    if others.unknown:
        return new - stored
    own = placement.mask.exclusive - (wanted.wanted if wanted.paired else EMPTY)
    return new & (others.exclusive | own)
