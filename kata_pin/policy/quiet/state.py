"""The desired state of the node as a function of its topology, its interrupts and the placements.

Nothing is derived from the masks that are there now (D22).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.quiet.interrupts import NO_NODE, Interrupt
from kata_pin.model.quiet.tunables import (
    Goal,
    Include,
    KeepOff,
    QuietClaim,
    QuietState,
    Spared,
    TunableKey,
    TunableKind,
    TunableRecord,
)
from kata_pin.model.settings import VfioInterrupts
from kata_pin.model.topology import HostTopology


def quiet_state(
    topology: HostTopology, claims: Iterable[QuietClaim], interrupt_nodes: Collection[int]
) -> QuietState:
    """Return which pCPUs are quiet: those claimed, but for one on each NUMA node with interrupts.

    `interrupt_nodes` are the nodes of the interrupts that there are.
    """
    claims = tuple(claims)
    wanted = union(one.cpus for one in claims) & topology.online
    spared = tuple(_spared(topology, wanted, interrupt_nodes))
    quiet = wanted - CpuSet(one.cpu for one in spared)
    return QuietState(
        quiet,
        topology.online - quiet,
        union(one.full for one in claims) & quiet,
        union(one.crio for one in claims) & quiet,
        spared,
    )


def _spared(
    topology: HostTopology, wanted: CpuSet, interrupt_nodes: Collection[int]
) -> Iterator[Spared]:
    """Yield the first pCPU of each node that has interrupts and would have no other for them."""
    found = False
    for node, cpus in topology.nodes.items():
        if node in interrupt_nodes and cpus and cpus <= wanted:
            found = True
            reason = f"NUMA node {node} has interrupts, and no other pCPU that could handle them"
            yield Spared(topology.in_order(cpus)[0], reason)
    if not found and wanted and topology.online <= wanted:
        yield Spared(
            topology.in_order(wanted)[0], "no other pCPU is left that could handle interrupts"
        )


def interrupt_goals(
    topology: HostTopology,
    state: QuietState,
    interrupts: Iterable[Interrupt],
    claims: Iterable[QuietClaim],
    vfio: VfioInterrupts,
) -> Mapping[TunableKey, Goal]:
    """Return how each interrupt must be, none for those that may go anywhere."""
    owners: dict[str, CpuSet] = {}
    if vfio is VfioInterrupts.OWN:
        owners = {device: one.own for one in claims for device in one.devices}
    goals: dict[TunableKey, Goal] = {}
    made: dict[tuple[int, int], Goal] = {}  # most interrupts have one of a few goals
    for one in interrupts:
        own = union(owners.get(device, EMPTY) for device in one.row.vfio)
        off = state.quiet - own
        if off:
            goal = made.get((off.bits, one.node))
            if goal is None:
                near = topology.nodes.get(one.node, EMPTY) if one.node != NO_NODE else EMPTY
                homes = (near & state.housekeeping, state.housekeeping)
                goal = made[off.bits, one.node] = KeepOff(off, topology.online, homes)
            goals[TunableKey(TunableKind.INTERRUPT, str(one.number))] = goal
    return goals


def first_mask(topology: HostTopology, default: TunableRecord, born: Interrupt) -> str:
    """Return the mask that a new interrupt would have, had the default mask not been narrowed.

    Empty if it did not get its mask from the narrowed default mask. The kernel takes what is online
    of that, on the interrupt's NUMA node if there is any (kernel/irq/manage.c, irq_setup_affinity).
    """
    near = topology.nodes.get(born.node, EMPTY) if born.node != NO_NODE else EMPTY

    def initial(mask: str) -> CpuSet:
        there = CpuSet.parse(mask) & topology.online
        return there & near or there

    narrowed, first = initial(default.written), initial(default.first)
    return str(first) if born.mask == narrowed != first and not born.managed else ""


def default_mask_goal(topology: HostTopology, state: QuietState) -> Goal | None:
    """Return how the mask of new interrupts must be; CRI-O's pCPUs are its own business."""
    off = state.quiet - state.crio
    return KeepOff(off, topology.online, (state.housekeeping,)) if off else None


def irqbalance_goal(state: QuietState) -> Goal | None:
    """Return which pCPUs irqbalance must keep clear."""
    banned = state.quiet - state.crio
    return Include(banned) if banned else None
