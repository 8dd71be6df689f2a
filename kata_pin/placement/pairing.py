"""Which vCPU is paired with which exclusive CPUs, or bound by hand (D10).

All other threads go to the overhead CPUs (D11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, pcpus_are, union
from kata_pin.base.placement import Binding, Node, Note, SandboxMask
from kata_pin.base.sandbox import GuestTopology, Sandbox, Task, Thread
from kata_pin.base.settings import Overhead, OverheadKind, PlacementSettings, VcpuMode
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import ContainerKind, ThreadRole, count
from kata_pin.placement import notes
from kata_pin.placement.exclusive import Pools, Run, runs
from kata_pin.placement.masks import Want, WantKind, counted

# Claims on a run are considered in this order: a legal pair that exists is kept (by the registry,
# else by an observed one-CPU mask); a vCPU goes to the host NUMA node that its guest node's memory
# is bound to; guest thread siblings go to host thread siblings; the vCPUs of a container are
# neighbours; index. The guest topology is QEMU's, never the guest's own word.


def index_order(vcpus: Iterable[Thread]) -> list[Thread]:
    """Return vCPU threads by index; those of unknown index come first, oldest first.

    First in order is first to stay unpaired: an unknown index cannot be used in the guest map, so
    an exclusive CPU would be wasted on it.
    """

    def order(thread: Thread) -> tuple[int, int, int]:
        key, index = thread.key, thread.role.vcpu
        return (-1 if index is None else index, key.starttime, key.tid)

    return sorted(vcpus, key=order)


def holders(
    vcpus: Sequence[Thread], runs: Sequence[Run], kept: Mapping[ThreadKey, int]
) -> frozenset[ThreadKey]:
    """Return which vCPUs, in index order, are paired with the runs; the others are surplus.

    The first one serves the guest's own work and is surplus before any other. Of the rest, those
    that hold a run (by the registry, else by an observed one-CPU mask) keep it, so that a
    hotplugged vCPU moves no other; the last by index follow.
    """
    if len(vcpus) <= len(runs):
        return frozenset(thread.key for thread in vcpus)
    candidates = vcpus[1:]
    holding: dict[int, ThreadKey] = {}
    for cpu_of in (lambda thread: kept.get(thread.key), _observed_cpu):
        for thread in reversed(candidates):
            cpu = cpu_of(thread)
            number = next((n for n, run in enumerate(runs) if cpu in run.cpus), None)
            if number is not None and thread.key not in holding.values():
                holding.setdefault(number, thread.key)
    chosen = list(holding.values())
    others = [thread.key for thread in candidates if thread.key not in chosen]
    return frozenset(chosen + others[len(others) - (len(runs) - len(chosen)) :])


@dataclass
class Pairing:
    """One matching of vCPUs, in index order, with as many runs."""

    vcpus: Sequence[Thread]
    runs: Sequence[Run]
    guest: GuestTopology
    topology: HostTopology

    def __post_init__(self) -> None:
        self._run_of: dict[int, int] = {}  # rank of a vCPU to the number of its run
        self._free_ranks = dict.fromkeys(range(len(self.vcpus)))
        self._free_runs = dict.fromkeys(range(len(self.runs)))

    def match(self, kept: Mapping[ThreadKey, int]) -> dict[ThreadKey, Run]:
        """Consider all claims in order and return the run of each vCPU."""
        self._keep(lambda thread: kept.get(thread.key))
        self._keep(_observed_cpu)
        if self._free_ranks:
            self._by_node()
            self._by_sibling_and_container(tuple(self._free_ranks), tuple(self._free_runs))
        return {self.vcpus[rank].key: self.runs[number] for rank, number in self._run_of.items()}

    def _take(self, rank: int, number: int) -> None:
        self._run_of[rank] = number
        del self._free_ranks[rank]
        del self._free_runs[number]

    def _keep(self, cpu_of: Callable[[Thread], int | None]) -> None:
        """Keep pairs whose run is still there and not given to another."""
        run_with = {cpu: number for number in self._free_runs for cpu in self.runs[number].cpus}
        for rank in tuple(self._free_ranks):
            cpu = cpu_of(self.vcpus[rank])
            number = None if cpu is None else run_with.get(cpu)
            if number in self._free_runs:
                self._take(rank, number)

    def _by_node(self) -> None:
        """Serve the vCPUs of guest nodes whose memory is bound, narrowest binding first."""
        bound = self.guest.host_nodes
        for guest_node in sorted(bound, key=lambda node: (len(bound[node]), node)):
            ranks = [r for r in self._free_ranks if self._guest_node(r) == guest_node]
            if ranks:
                local = union(self.topology.nodes.get(n, EMPTY) for n in bound[guest_node])
                numbers = [s for s in self._free_runs if self.runs[s].cpus <= local]
                self._by_sibling_and_container(ranks, numbers)

    def _guest_node(self, rank: int) -> int | None:
        index = self.vcpus[rank].role.vcpu
        return None if index is None else self.guest.numa.get(index)

    def _by_sibling_and_container(self, ranks: Sequence[int], numbers: Sequence[int]) -> None:
        if self.guest.threads > 1:
            self._by_sibling(ranks, numbers)
        left_ranks = [rank for rank in ranks if rank in self._free_ranks]
        left_numbers = [number for number in numbers if number in self._free_runs]
        self._by_container(left_ranks, left_numbers)

    def _by_sibling(self, ranks: Sequence[int], numbers: Sequence[int]) -> None:
        """Put the vCPUs of a guest core on the runs of one host core, where one has room."""
        free_of_core: dict[int, list[int]] = {}
        for number in numbers:
            core = self._core_of(self.runs[number])
            if core is not None:
                free_of_core.setdefault(core, []).append(number)
        for siblings in self._guest_cores(ranks):
            core = self._host_core_for(siblings, free_of_core)
            if core is None:
                continue
            free = free_of_core[core]
            for rank in siblings:
                if rank in self._free_ranks and free:
                    self._take(rank, free.pop(0))

    def _guest_cores(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return the guest cores of `ranks`, each with all its ranks, also those served."""
        cores: dict[int, list[int]] = {}
        for rank, thread in enumerate(self.vcpus):
            if thread.role.vcpu is not None:
                cores.setdefault(self.guest.siblings_of(thread.role.vcpu), []).append(rank)
        wanted = set(ranks)
        return [core for core in cores.values() if len(core) > 1 and wanted & set(core)]

    def _host_core_for(self, siblings: list[int], free: Mapping[int, list[int]]) -> int | None:
        for rank in siblings:
            if rank in self._run_of:
                core = self._core_of(self.runs[self._run_of[rank]])
                return core if core in free else None
        return next((core for core, runs in free.items() if len(runs) >= len(siblings)), None)

    def _core_of(self, run: Run) -> int | None:
        """Return the host core that holds the whole run."""
        cpu = self.topology.get(run.cpus.first)
        if cpu is None or not run.cpus <= self.topology.siblings(cpu.cpu):
            return None
        return cpu.core

    def _by_container(self, ranks: list[int], numbers: Sequence[int]) -> None:
        """Give each container neighbouring vCPUs: those next to what it has, else by index."""
        runs_of: dict[str, list[int]] = {}
        for number in numbers:
            runs_of.setdefault(self.runs[number].container_id, []).append(number)
        spans = self._spans()
        for container_id in sorted(runs_of, key=lambda one: one not in spans):
            wanted = runs_of[container_id]
            chosen = _nearest(ranks, spans.get(container_id), len(wanted))
            for rank, number in zip(chosen, wanted, strict=False):
                self._take(rank, number)
            ranks = [rank for rank in ranks if rank in self._free_ranks]

    def _spans(self) -> dict[str, tuple[int, int]]:
        """Return the lowest and highest rank that each container has so far."""
        spans: dict[str, tuple[int, int]] = {}
        for rank, number in self._run_of.items():
            container_id = self.runs[number].container_id
            low, high = spans.get(container_id, (rank, rank))
            spans[container_id] = (min(low, rank), max(high, rank))
        return spans


def _observed_cpu(thread: Thread) -> int | None:
    affinity = thread.task.affinity
    return affinity.first if len(affinity) == 1 else None


def _nearest(ranks: list[int], span: tuple[int, int] | None, most: int) -> list[int]:
    """Return `most` of the ascending ranks, the nearest to the span, ascending."""
    if span is None or len(ranks) <= most:
        return ranks[:most]
    low, high = span
    return sorted(sorted(ranks, key=lambda rank: (max(low - rank, rank - high, 0), rank))[:most])


# Where threads that are not vCPUs go, and unpaired vCPUs (D11).

_LEAVE: Final = Overhead(OverheadKind.LEAVE)


def setting_for(settings: PlacementSettings, role: ThreadRole) -> Overhead:
    """Return the overhead setting of a role; the shim is not managed unless it has its own."""
    own = settings.overhead_roles.get(role)
    if own is not None:
        return own
    return _LEAVE if role is ThreadRole.SHIM else settings.overhead


def is_unmanaged(role: ThreadRole, settings: PlacementSettings) -> bool:
    """Return whether the settings leave threads of this role alone."""
    if role is ThreadRole.VCPU:
        return settings.vcpus is VcpuMode.LEAVE
    return setting_for(settings, role).kind is OverheadKind.LEAVE


def reserve_size(settings: PlacementSettings) -> int:
    """Return k: how many exclusive CPUs the settings reserve, the largest `reserve:k` of any role.

    Counted whether or not a thread of that role exists now, so that pairs stay when one appears.
    """
    every = (settings.overhead, *settings.overhead_roles.values())
    return max((one.reserve for one in every if one.kind is OverheadKind.RESERVE), default=0)


@dataclass
class Scene:
    """What the rules for one sandbox depend on beside the threads themselves; it has a mask.

    `unsure` is how many threads of disputed role there are: each may be a vCPU.
    """

    sandbox: Sandbox
    node: Node
    mask: SandboxMask
    pools: Pools
    kept: Mapping[ThreadKey, int]
    unsure: int = 0

    def __post_init__(self) -> None:
        kubelet = self.node.kubelet
        self._shared = self.mask.shared | self.mask.overhead_extra
        self._whole = (self.mask.mask or EMPTY) | self.mask.overhead_extra
        self._default = kubelet.default if kubelet is not None and kubelet.static else EMPTY

    @property
    def shared_containers(self) -> list[str]:
        """Return the titles of counting containers that have nothing to pair."""
        having = {pool.container_id for pool in self.pools.pools}
        return [
            one.title
            for one in counted(self.sandbox, self.node)
            if one.kind is ContainerKind.CONTAINER and one.id not in having
        ]

    def overhead(self, threads: Iterable[Thread]) -> Iterator[Want]:
        """Yield the want of each thread that is no vCPU and is managed."""
        for thread in threads:
            role = thread.role.role
            setting = setting_for(self.node.settings, role)
            if setting.kind is OverheadKind.LEAVE:
                continue
            is_main = role is ThreadRole.EMULATOR and thread.key.tid == thread.key.tgid
            if is_main and not self.node.live_threads:
                reason = "main thread: sandbox mask (new threads inherit it; no events report them)"
                yield Want(thread, self.mask.mask or EMPTY, WantKind.OVERHEAD, reason)
                continue
            cpus, reason = self._cpus(setting, thread.task)
            yield Want(thread, cpus, WantKind.OVERHEAD, reason)

    def surplus(self, thread: Thread) -> Want | None:
        """Return the want of an unpaired vCPU, None when the setting is `leave`."""
        setting = setting_for(self.node.settings, ThreadRole.VCPU)
        if setting.kind is OverheadKind.LEAVE:
            return None
        cpus, reason = self._cpus(setting, thread.task)
        return Want(thread, cpus, WantKind.SURPLUS, f"unpaired vCPU: {reason}")

    def _cpus(self, setting: Overhead, task: Task) -> tuple[CpuSet, str]:
        match setting.kind:
            case OverheadKind.AUTO:
                return self._auto(task)
            case OverheadKind.SANDBOX:
                return self._whole, "sandbox mask (overhead: sandbox)"
            case OverheadKind.HOUSEKEEPING:
                return self.node.settings.housekeeping, "housekeeping CPUs (overhead: housekeeping)"
            case OverheadKind.RESERVE:
                # [-0:] would be everything
                cpus = self.pools.reserved[-setting.reserve :] if setting.reserve > 0 else ()
                return CpuSet(cpus), f"last exclusive CPUs (overhead: {setting})"
            case _:
                return setting.cpus, f"configured CPUs (overhead: {setting})"

    def _auto(self, task: Task) -> tuple[CpuSet, str]:
        if self._shared:
            return self._shared, "shared CPUs (overhead: auto)"
        reachable = self._default & self.node.topology.online
        if task.cpuset:
            reachable &= task.cpuset
        if reachable:
            return self._default, "kubelet's default set (overhead: auto)"
        return self._whole, "sandbox mask, no shared CPU is reachable (overhead: auto)"


# What policy wants for the vCPU threads of a sandbox (D10).


def vcpu_wants(vcpus: Sequence[Thread], scene: Scene) -> tuple[list[Want], list[Note]]:
    """Return the wants of the vCPU threads by the mode of the settings, and the notes.

    `vcpus` are vCPU threads whose role no source disputes. A vCPU without a want is not managed.
    """
    ordered = index_order(vcpus)
    mode = scene.node.settings.vcpus
    if mode is VcpuMode.LEAVE or not ordered:
        return [], []
    if mode is VcpuMode.FLOAT:
        return list(_on_mask(ordered, scene, "sandbox mask (vcpus: float)")), []
    return _pair(ordered, scene)


def _pair(vcpus: Sequence[Thread], scene: Scene) -> tuple[list[Want], list[Note]]:
    pools = scene.pools
    said = list(_pool_notes(scene))
    unknown = [thread.key.tid for thread in vcpus if thread.role.vcpu is None]
    if unknown:
        said.append(notes.note("vcpu-index-unknown", tids=notes.tids(unknown)))
    if not pools.pools:
        reason = "sandbox mask: no exclusive CPUs to pair with"
        return list(_on_mask(vcpus, scene, reason)), said
    number, exclusive, containers = len(vcpus), pools.size, len(pools.pools)
    if number < containers:
        known = notes.VcpuCount(number, scene.unsure, scene.sandbox.vmm)
        more = known.remedies(exclusive)
        code = "fewer-vcpus-than-containers"
        said.append(notes.note(code, vcpus=known, containers=containers, remedies=more))
        reason = "sandbox mask: fewer vCPUs than containers with exclusive CPUs"
        return list(_on_mask(vcpus, scene, reason)), said
    shared = scene.shared_containers
    for_shared = int(bool(shared) and containers < number < exclusive)
    cut = runs(pools.pools, number - for_shared)
    paired = holders(vcpus, cut, scene.kept)
    surplus = [thread for thread in vcpus if thread.key not in paired]
    wants = list(_unpaired(surplus, scene, kept_for_shared=bool(for_shared)))
    wants += _paired([thread for thread in vcpus if thread.key in paired], cut, scene)
    said += _size_notes(scene, number, len(surplus), shared)
    return wants, said


def _paired(vcpus: Sequence[Thread], cut: Sequence[Run], scene: Scene) -> Iterator[Want]:
    guest = scene.sandbox.vmm.guest if scene.sandbox.vmm is not None else GuestTopology()
    run_of = Pairing(vcpus, cut, guest, scene.node.topology).match(scene.kept)
    titles = {one.id: one.title for one in scene.sandbox.containers}
    for thread in vcpus:
        run = run_of[thread.key]
        reason = f"paired with exclusive CPUs of container {titles[run.container_id]}"
        yield Want(thread, run.cpus, WantKind.PAIRED, reason, run.container_id)


def _unpaired(vcpus: Sequence[Thread], scene: Scene, *, kept_for_shared: bool) -> Iterator[Want]:
    """Yield wants of vCPUs beyond the pairs: overhead's, or the shared CPUs for the one kept."""
    for thread in vcpus:
        if kept_for_shared and scene.mask.shared:
            reason = "serves the containers without exclusive CPUs"
            yield Want(thread, scene.mask.shared, WantKind.SHARED, reason)
            continue
        want = scene.surplus(thread)
        if want is not None:
            yield want


def _on_mask(vcpus: Sequence[Thread], scene: Scene, reason: str) -> Iterator[Want]:
    cpus = scene.mask.mask or EMPTY
    return (Want(thread, cpus, WantKind.FLOAT, reason) for thread in vcpus)


def _pool_notes(scene: Scene) -> Iterator[Note]:
    pools = scene.pools
    if pools.overlap:
        yield notes.note("exclusive-overlap", cpus=pools.overlap)
    if pools.offline:
        yield notes.note("exclusive-offline", cpus=pools.offline)
    if pools.exclusive and not pools.size:
        reserve, exclusive = (
            reserve_size(scene.node.settings),
            count(pools.exclusive, "exclusive CPU"),
        )
        yield notes.note("reserve-too-large", reserve=reserve, exclusive=exclusive)
    elif pools.emptied:
        titles = {one.id: one.title for one in scene.sandbox.containers}
        names = notes.named(titles[one] for one in pools.emptied)
        yield notes.note("reserve-takes-container", names=names)


def _size_notes(scene: Scene, vcpus: int, beyond: int, shared: Sequence[str]) -> Iterator[Note]:
    exclusive, known = scene.pools.size, notes.VcpuCount(vcpus, scene.unsure, scene.sandbox.vmm)
    if vcpus < exclusive:
        yield notes.note("fewer-vcpus", size=notes.size_text(known, exclusive))
    if not shared:
        return
    names = notes.named(shared)
    setting, own = setting_for(scene.node.settings, ThreadRole.VCPU), scene.mask.shared
    apart = {OverheadKind.HOUSEKEEPING, OverheadKind.RESERVE, OverheadKind.CPUS}
    if not beyond:
        more = known.remedies(exclusive)
        yield notes.note("shared-without-vcpu", names=names, remedies=more)
    elif vcpus >= exclusive and own and setting.kind in apart:
        yield notes.note("shared-on-overhead", names=names, setting=setting, shared=own)


# CPUs that an administrator named for a sandbox: a source of what is wanted, above the policy.
#
# A binding says where vCPUs run, and may say where everything else runs. It is above the settings
# `vcpus` and `overhead` and above pairs, and below all that limits those too: what other pods have
# exclusively, cpusets of cgroups, CPUs that are offline, Kata's own pinning, `unpin`. What it
# cannot have whole it does not have at all: `obstacle` says why, and the policy decides as without
# it.

REASON = "bound by hand"


def obstacle(
    binding: Binding,
    threads: Iterable[Thread],
    online: CpuSet,
    taken: CpuSet,
) -> str:
    """Return why a binding cannot be applied whole, empty if it can.

    `threads` are those that it is about, `taken` are the CPUs that other pods have exclusively.
    """
    places = places_of(binding)
    asked = binding.cpus | binding.overhead
    if asked - online:
        return f"{pcpus_are(asked - online)} not online"
    if asked & taken:
        return f"{pcpus_are(asked & taken)} exclusive to another pod"
    found: dict[int | None, list[Thread]] = {}
    for thread in threads:
        vcpu = thread.role.role is ThreadRole.VCPU and thread.role.vcpu in places
        if vcpu:
            found.setdefault(thread.role.vcpu, []).append(thread)
        cpus = places[thread.role.vcpu] if vcpu and thread.role.vcpu is not None else EMPTY
        wanted = cpus or binding.overhead
        if wanted and thread.task.cpuset and wanted - thread.task.cpuset:
            return (
                f"cgroup {thread.task.cgroup} of {thread.label} (tid {thread.key.tid}) allows only"
                f" {thread.task.cpuset}"
            )
    for index in places:
        if len(found.get(index, ())) != 1:
            return f"the VM has no vCPU {index}, or its thread is not known"
        if found[index][0].role.conflict:
            return f"sources disagree about the thread of vCPU {index}"
    return ""


def places_of(binding: Binding) -> Mapping[int, CpuSet]:
    """Return the CPUs of each vCPU: one each, in order, if there are as many; else all of them."""
    if len(binding.vcpus) == len(binding.cpus):
        return {v: CpuSet((cpu,)) for v, cpu in zip(binding.vcpus, binding.cpus, strict=True)}
    return dict.fromkeys(binding.vcpus, binding.cpus)


def around(binding: Binding, mask: SandboxMask) -> SandboxMask:
    """Return the mask that the policy has for all other threads: without the bound CPUs.

    Where nothing else is left they share them.
    """
    claims = tuple(replace(one, exclusive=one.exclusive - binding.cpus) for one in mask.claims)
    left = (mask.mask or EMPTY) - binding.cpus
    return replace(
        mask,
        mask=left or mask.mask,
        exclusive=mask.exclusive - binding.cpus,
        shared=mask.shared - binding.cpus if left else mask.shared,
        claims=claims,
    )


def wants(binding: Binding, vcpus: Sequence[Thread], mask: SandboxMask) -> Iterator[Want]:
    """Yield the wants of the bound vCPUs.

    One on the exclusive CPU of a container serves that container, in the guest too.
    """
    places = places_of(binding)
    for thread in vcpus:
        if thread.role.vcpu is None or thread.role.vcpu not in places:
            continue
        cpus = places[thread.role.vcpu]
        owner = next((one for one in mask.claims if cpus <= one.exclusive), None)
        kind = WantKind.PAIRED if owner is not None else WantKind.FLOAT
        yield Want(thread, cpus, kind, REASON, owner.container_id if owner else "")


def redirected(binding: Binding | None, others: Iterable[Want]) -> Iterator[Want]:
    """Yield the policy's wants for all other threads, with the overhead that a binding names."""
    for want in others:
        if (
            binding is not None
            and binding.overhead
            and want.kind in {WantKind.OVERHEAD, WantKind.SURPLUS}
        ):
            yield want._replace(cpus=binding.overhead, reason=f"overhead {REASON}")
        else:
            yield want
