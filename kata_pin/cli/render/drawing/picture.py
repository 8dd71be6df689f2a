"""What is drawn of each pCPU: its use, its owners, their roles, and what is wrong. Pure.

Made of the state document as `show --cpus` sees it (reports/pcpus.py), and of the share of time
that foreign tasks ran on pCPUs, where that was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from string import ascii_uppercase
from typing import Final

from kata_pin.cli.render import cpus as claims
from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import Output
from kata_pin.cli.render.prove import METHODS
from kata_pin.cli.reports import findings, pcpus, words
from kata_pin.cli.reports.foreign import NOTHING, Looked
from kata_pin.cli.reports.pcpus import Pcpu, parse
from kata_pin.cli.reports.words import safe
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.reports.check import Finding
from kata_pin.model.reports.state import CpuPlace, State

MAX_NAME: Final = 300
"""Longest name that is drawn; `namespace/name (container)` of Kubernetes is shorter."""

SEVERAL: Final = "*"
"""Key of a pCPU that several owners share."""


class Use(StrEnum):
    """What a pCPU is for."""

    EXCLUSIVE = "exclusive"
    SHARED = "shared"
    RESERVED = "reserved"
    HOUSEKEEPING = "housekeeping"
    FREE = "free"
    OFFLINE = "offline"


MEANING: Final = {
    Use.EXCLUSIVE: "of one container alone",
    Use.SHARED: "of several containers, or the shared pool",
    Use.RESERVED: "in the shared pool, never exclusive",
    Use.HOUSEKEEPING: "for the overhead of VMs",
    Use.FREE: "in no pool, of no sandbox",
    Use.OFFLINE: "present, not online",
}


@dataclass(frozen=True)
class Owner:
    """Who has pCPUs: a sandbox, or a container outside of sandboxes."""

    key: str  # one letter or more, unique in the picture
    colour: int  # its place among the owners
    name: str  # printable
    exclusive: CpuSet
    shared: CpuSet


@dataclass(frozen=True)
class Tile:
    """One pCPU. All texts are printable, but not escaped for SVG or HTML."""

    number: int
    use: Use
    owners: tuple[Owner, ...] = ()  # of an exclusive one those that it is exclusive to
    roles: str = ""  # roles of the owners' threads
    threads: str = ""  # every sandbox's threads that may run on it
    problems: tuple[Finding, ...] = ()
    foreign: float | None = None  # share of time of foreign tasks, 0..1; None: not measured
    marks: tuple[str, ...] = ()
    place: CpuPlace | None = None  # None: offline

    @property
    def key(self) -> str:
        """The owner's key; empty without an owner."""
        if len(self.owners) > 1:
            return SEVERAL
        return self.owners[0].key if self.owners else ""

    @property
    def owner(self) -> str:
        """The owner's name, or how many there are; empty without an owner."""
        if len(self.owners) > 1:
            return f"{len(self.owners)} owners"
        return self.owners[0].name if self.owners else ""

    @property
    def colour(self) -> int | None:
        """The owner's place among the owners; None for no owner, or several."""
        return self.owners[0].colour if self.key not in {"", SEVERAL} else None


@dataclass(frozen=True)
class Picture:
    """The pCPUs in topology order, offline ones last, and the owners that the keys stand for."""

    tiles: tuple[Tile, ...]
    owners: tuple[Owner, ...]
    notes: tuple[str, ...] = ()  # how foreign time was measured, and why not; printable

    @property
    def wrong(self) -> Iterator[str]:
        """What the flags of the tiles mean, in sentences; printable."""
        for one in dict.fromkeys(one for tile in self.tiles for one in tile.problems):
            yield safe(f"! {one.kind}: {one.text}")
        for tile in self.tiles:
            told = any(one.kind == "foreign" for one in tile.problems)
            if tile.foreign and not told:
                yield f"pCPU {tile.number}: foreign tasks ran {percent(tile)} of the time"


def picture(
    state: State,
    output: Output,
    looked: Looked = NOTHING,
    foreign: Mapping[int, float] | None = None,
) -> Picture:
    """Return what is drawn of a node.

    Findings of `check` that fail are marked on the exclusive pCPUs that they concern. `looked` is
    what was measured for them; `foreign` has other shares of time, 0 to 1, by pCPU.
    """
    found = findings.check(state, (), intruders_fail=False, looked=looked).findings
    shares = dict(foreign or {})
    for one in found:
        if one.foreign is not None:
            cpu = one.foreign.cpu
            shares[cpu] = shares.get(cpu, 0.0) + one.foreign.percent / 100
    owners = _owners(state)
    pools = _pools(state)
    wrong = [(parse(one.cpus), one) for one in found if one.fails and one.cpus]
    tiles = []
    for pcpu in pcpus.view(state):
        cpu = pcpu.number
        exclusive = [one for one in owners if cpu in one.exclusive]
        tiles.append(
            Tile(
                cpu,
                Use.EXCLUSIVE if exclusive else pools.get(cpu, _unpooled(pcpu)),
                owners=tuple(exclusive or (one for one in owners if cpu in one.shared)),
                roles=safe(_roles(pcpu, output)),
                threads=claims.threads(pcpu, output).plain,
                problems=tuple(one for cpus, one in wrong if exclusive and cpu in cpus),
                foreign=shares.get(cpu),
                marks=tuple(safe(one) for one in pcpu.marks),
                place=pcpu.place,
            )
        )
    gone = (Tile(cpu, Use.OFFLINE) for cpu in pcpus.offline(state))
    return Picture((*tiles, *gone), owners, tuple(_notes(looked)))


def percent(tile: Tile) -> str:
    """Return the share of time of foreign tasks, such as `2.1%`."""
    found = (tile.foreign or 0) * 100
    return f"{found:.0f}%" if found >= 10 else f"{max(found, 0.1):.1f}%"


def _notes(looked: Looked) -> Iterator[str]:
    how = looked.measured
    if how is not None:
        cpus = count(len(parse(how.cpus)), "exclusive pCPU")
        yield safe(f"{cpus} measured for {how.seconds:g} s by {METHODS[how.method]}")
    for one in looked.unknown:
        yield safe(f"could not tell: {one}")


def _unpooled(pcpu: Pcpu) -> Use:
    return Use.SHARED if pcpu.shared or pcpu.in_default else Use.FREE


def _pools(state: State) -> dict[int, Use]:
    """Return the use of the pCPUs in our allocator's pools, if it decides."""
    allocation = state.allocation
    if allocation is None or allocation.suspended:
        return {}
    found = allocation.pools
    return (
        dict.fromkeys(parse(found.shared), Use.SHARED)
        | dict.fromkeys(parse(found.housekeeping), Use.HOUSEKEEPING)
        | dict.fromkeys(parse(found.reserved), Use.RESERVED)
    )


def _owners(state: State) -> tuple[Owner, ...]:
    """Return who has pCPUs: sandboxes, and containers outside of them with exclusive ones."""
    found: list[tuple[str, CpuSet, CpuSet]] = []
    inside = set()
    for sandbox in state.sandboxes:
        exclusive = parse(sandbox.exclusive)
        found.append((words.owner(sandbox), exclusive, parse(sandbox.mask) - exclusive))
        inside |= {one.id for one in sandbox.containers}
    for identity, name, cpus in _others(state):
        if identity not in inside:
            found.append((name, cpus, CpuSet()))
    if rest := parse(state.node.assigned) - union(exclusive for _, exclusive, _ in found):
        found.append(("pods without a VM", rest, CpuSet()))
    ordered = sorted((one for one in found if one[1] or one[2]), key=_by_first_pcpu)
    return tuple(
        Owner(_key(n), n, safe(name[:MAX_NAME]), exclusive, shared)
        for n, (name, exclusive, shared) in enumerate(ordered)
    )


def _others(state: State) -> Iterator[tuple[str, str, CpuSet]]:
    """Yield (id, name, exclusive pCPUs) of containers that may be in no sandbox."""
    allocation = state.allocation
    if allocation is None:
        return
    for one in () if allocation.suspended else allocation.grants:
        if not one.sandbox:
            yield one.id, f"{one.pod} ({one.name})", parse(one.exclusive)
    for held in allocation.holders:
        yield held.id, f"{held.pod} ({held.name})" if held.name else held.pod, parse(held.cpus)


def _by_first_pcpu(owner: tuple[str, CpuSet, CpuSet]) -> tuple[bool, int]:
    """Sort key: owners of exclusive pCPUs first, by the lowest."""
    _, exclusive, shared = owner
    return not exclusive, (exclusive or shared).first


def _key(place: int) -> str:
    """Return A to Z, AA to ZZ, and so on."""
    place, letter = divmod(place, len(ascii_uppercase))
    return (_key(place - 1) if place else "") + ascii_uppercase[letter]


def _roles(pcpu: Pcpu, output: Output) -> str:
    """Return the roles of the threads of those that claim the pCPU."""
    claimed = {sandbox.id for sandbox in pcpu.exclusive or pcpu.shared}
    mine = [thread for sandbox, thread in pcpu.threads if sandbox.id in claimed]
    if len(claimed) == 1:
        return phrases.roles(mine, output)
    counts: dict[str, int] = {}
    for thread in sorted(mine, key=lambda one: one.role != "vcpu"):
        counts[thread.role] = counts.get(thread.role, 0) + 1
    return ", ".join(r if n == 1 else f"{r} {output.times}{n}" for r, n in counts.items())
