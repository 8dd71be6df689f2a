"""What policy wants for the vCPU threads of a sandbox (D10)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kata_pin.model.cpuset import EMPTY
from kata_pin.model.node import Node
from kata_pin.model.placement import Note, SandboxMask
from kata_pin.model.sandbox import ContainerKind, GuestTopology, Sandbox
from kata_pin.model.settings import OverheadKind, VcpuMode
from kata_pin.model.thread import Thread, ThreadKey, ThreadRole
from kata_pin.policy.placement import notes
from kata_pin.policy.placement.mask import counted
from kata_pin.policy.placement.overhead import OverheadHome, reserve_size, setting_for
from kata_pin.policy.placement.pairing import Pairing, holders, index_order
from kata_pin.policy.placement.pools import Pools, Run, runs
from kata_pin.policy.placement.want import Kind, Want


@dataclass(frozen=True)
class VcpuScene:
    """What the vCPU rules depend on beside the threads themselves.

    `unsure` is how many threads of disputed role there are: each may be a vCPU.
    """

    sandbox: Sandbox
    node: Node
    mask: SandboxMask
    pools: Pools
    home: OverheadHome
    kept: Mapping[ThreadKey, int]
    unsure: int = 0

    @property
    def shared_containers(self) -> list[str]:
        """Return the titles of counting containers that have nothing to pair."""
        having = {pool.container_id for pool in self.pools.pools}
        return [
            one.title
            for one in counted(self.sandbox, self.node)
            if one.kind is ContainerKind.CONTAINER and one.id not in having
        ]


def vcpu_wants(vcpus: Sequence[Thread], scene: VcpuScene) -> tuple[list[Want], list[Note]]:
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


def _pair(vcpus: Sequence[Thread], scene: VcpuScene) -> tuple[list[Want], list[Note]]:
    pools = scene.pools
    said = list(_pool_notes(scene))
    unknown = [thread.key.tid for thread in vcpus if thread.role.vcpu is None]
    if unknown:
        said.append(notes.vcpu_index_unknown(unknown))
    if not pools.pools:
        reason = "sandbox mask: no exclusive CPUs to pair with"
        return list(_on_mask(vcpus, scene, reason)), said
    count, exclusive, containers = len(vcpus), pools.size, len(pools.pools)
    if count < containers:
        known = notes.VcpuCount(count, scene.unsure)
        said.append(notes.fewer_vcpus_than_containers(known, containers, exclusive))
        reason = "sandbox mask: fewer vCPUs than containers with exclusive CPUs"
        return list(_on_mask(vcpus, scene, reason)), said
    shared = scene.shared_containers
    for_shared = int(bool(shared) and containers < count < exclusive)
    cut = runs(pools.pools, count - for_shared)
    paired = holders(vcpus, cut, scene.kept)
    surplus = [thread for thread in vcpus if thread.key not in paired]
    beyond = len(surplus)
    wants = list(_unpaired(surplus, scene, kept_for_shared=bool(for_shared)))
    wants += _paired([thread for thread in vcpus if thread.key in paired], cut, scene)
    said += _size_notes(scene, count, beyond, shared)
    return wants, said


def _paired(vcpus: Sequence[Thread], cut: Sequence[Run], scene: VcpuScene) -> Iterator[Want]:
    guest = scene.sandbox.vmm.guest if scene.sandbox.vmm is not None else GuestTopology()
    run_of = Pairing(vcpus, cut, guest, scene.node.topology).match(scene.kept)
    titles = {one.id: one.title for one in scene.sandbox.containers}
    for thread in vcpus:
        run = run_of[thread.key]
        reason = f"paired with exclusive CPUs of container {titles[run.container_id]}"
        yield Want(thread, run.cpus, Kind.PAIRED, reason, run.container_id)


def _unpaired(
    vcpus: Sequence[Thread], scene: VcpuScene, *, kept_for_shared: bool
) -> Iterator[Want]:
    """Yield wants of vCPUs beyond the pairs: overhead's, or the shared CPUs for the one kept."""
    for thread in vcpus:
        if kept_for_shared and scene.mask.shared:
            reason = "serves the containers without exclusive CPUs"
            yield Want(thread, scene.mask.shared, Kind.SHARED, reason)
            continue
        want = scene.home.surplus(thread)
        if want is not None:
            yield want


def _on_mask(vcpus: Sequence[Thread], scene: VcpuScene, reason: str) -> Iterator[Want]:
    cpus = scene.mask.mask or EMPTY
    return (Want(thread, cpus, Kind.FLOAT, reason) for thread in vcpus)


def _pool_notes(scene: VcpuScene) -> Iterator[Note]:
    pools = scene.pools
    if pools.overlap:
        yield notes.exclusive_overlap(pools.overlap)
    if pools.offline:
        yield notes.exclusive_offline(pools.offline)
    if pools.exclusive and not pools.size:
        yield notes.reserve_too_large(reserve_size(scene.node.settings), pools.exclusive)
    elif pools.emptied:
        titles = {one.id: one.title for one in scene.sandbox.containers}
        yield notes.reserve_takes_container([titles[one] for one in pools.emptied])


def _size_notes(scene: VcpuScene, count: int, beyond: int, shared: Sequence[str]) -> Iterator[Note]:
    exclusive, known = scene.pools.size, notes.VcpuCount(count, scene.unsure)
    if count < exclusive:
        yield notes.fewer_vcpus(known, exclusive)
    if not shared:
        return
    setting, own = setting_for(scene.node.settings, ThreadRole.VCPU), scene.mask.shared
    apart = {OverheadKind.HOUSEKEEPING, OverheadKind.RESERVE, OverheadKind.CPUS}
    if not beyond:
        yield notes.shared_without_vcpu(shared, known, exclusive)
    elif count >= exclusive and own and setting.kind in apart:
        yield notes.shared_on_overhead(shared, setting, own)
