"""What is drawn of each pCPU, and where the parts of a node go on a grid of characters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum, StrEnum
from itertools import groupby
from operator import attrgetter
from string import ascii_uppercase
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuPlace, CpuSet, union
from kata_pin.base.documents.check import Finding
from kata_pin.base.documents.state import State
from kata_pin.base.values import count
from kata_pin.cli.render import cpus as claims
from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import Output, cell_len, fitting
from kata_pin.cli.render.prove import METHODS
from kata_pin.cli.reports import findings, pcpus, words
from kata_pin.cli.reports.findings import NOTHING, Looked
from kata_pin.cli.reports.pcpus import Pcpu, parse
from kata_pin.cli.reports.words import safe

# What is drawn of each pCPU: its use, its owners, their roles, and what is wrong.
#
# Made of the state document as `show --cpus` sees it (cli/reports/pcpus.py), and of the share of
# time that foreign tasks ran on pCPUs, where that was measured.

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


_MEANING: Final = {
    Use.EXCLUSIVE: "of one container alone",
    Use.SHARED: "of several containers, or the shared pool",
    Use.RESERVED: "in the shared pool, never exclusive",
    Use.HOUSEKEEPING: "for the overhead of VMs",
    Use.FREE: "in no pool, of no sandbox",
    Use.OFFLINE: "present, not online",
}


class DrawnOwner(Struct, frozen=True):
    """Who has pCPUs: a sandbox, or a container outside of sandboxes."""

    key: str  # one letter or more, unique in the picture
    colour: int  # its place among the owners
    name: str  # printable
    exclusive: CpuSet
    shared: CpuSet


class Tile(Struct, frozen=True):
    """One pCPU. All texts are printable, but not escaped for SVG or HTML."""

    number: int
    use: Use
    owners: tuple[DrawnOwner, ...] = ()  # of an exclusive one those that it is exclusive to
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


class Picture(Struct, frozen=True):
    """The pCPUs in topology order, offline ones last, and the owners that the keys stand for."""

    tiles: tuple[Tile, ...]
    owners: tuple[DrawnOwner, ...]
    notes: tuple[str, ...] = ()  # how foreign time was measured, and why not; printable

    def legend(self) -> Iterator[tuple[Use, CpuSet, str]]:
        """Yield each use that occurs, with its pCPUs and what it means here."""
        for use in Use:
            cpus = CpuSet(one.number for one in self.tiles if one.use is use)
            several = CpuSet(
                one.number for one in self.tiles if one.use is use and one.key == SEVERAL
            )
            meaning = _MEANING[use]
            if use is Use.EXCLUSIVE and several:
                alone = f"{meaning}, but {several} " if cpus != several else ""
                meaning = f"{alone}of several: a conflict"
            if cpus:
                yield use, cpus, meaning

    @property
    def wrong(self) -> Iterator[str]:
        """What the flags of the tiles mean, in sentences; printable."""
        for one in dict.fromkeys(one for tile in self.tiles for one in tile.problems):
            yield safe(f"! {one.kind}: {one.text}")
        for tile in self.tiles:
            shown = any(one.kind == "foreign" for one in tile.problems)
            if tile.foreign and not shown:
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


def _owners(state: State) -> tuple[DrawnOwner, ...]:
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
        DrawnOwner(_key(n), n, safe(name[:MAX_NAME]), exclusive, shared)
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


# Where the parts of a node go: a tree of boxes on a grid of characters.
#
# Package, NUMA node, last-level cache, core and pCPU, as lstopo nests them; a level that adds
# nothing is left out, or named in the title of the one around it. A terminal prints the grid as it
# is, SVG multiplies it. A box with a frame loses a character on each side to it; the others touch
# their neighbours. Tiles are as detailed as there is room for.

FRAMES: Final = 3
"""Most frames around a core: package, NUMA node, cache."""


class Detail(IntEnum):
    """How much a pCPU's tile says."""

    NUMBER = 1  # one line: number, owner's key, flags
    ROLE = 2  # and the roles
    OWNER = 3  # framed: and the owner's name, the use in words


class Box(Struct, frozen=True):
    """A rectangle; `x` and `y` count from the inside of the box around it."""

    kind: str  # group, core, pcpu, or node for the whole
    width: int
    height: int
    x: int = 0
    y: int = 0
    framed: bool = False
    title: str = ""
    lines: tuple[str, ...] = ()  # of a tile; the first column is left to the sign of its use
    children: tuple[Box, ...] = ()
    tile: Tile | None = None

    @property
    def inset(self) -> int:
        """How far its inside is from its edge."""
        return 1 if self.framed else 0


Choice = tuple[Detail, int, int]

SCREEN: Final[tuple[Choice, ...]] = (
    (Detail.OWNER, 32, 16),
    (Detail.OWNER, 24, 24),
    (Detail.OWNER, 17, 50),
    (Detail.ROLE, 11, 50),
    (Detail.NUMBER, 0, 0),
)
"""Detail and least columns of a tile, and the rows up to which it is chosen; the last one always.

The numbers' tiles are as wide as the numbers need.
"""

Level = Callable[[CpuPlace], int]

_package, _node, _cache, _core = map(attrgetter, ("package", "node", "llc", "core"))


def fitted(picture: Picture, output: Output, choices: Sequence[Choice] = SCREEN) -> Box:
    """Return the node as the first choice that fits has it, else as the last."""
    *preferred, last = choices
    for detail, width, rows in preferred:
        found = laid_out(picture, output, detail, width)
        if found.height <= rows and found.width <= output.width:
            return found
    return laid_out(picture, output, *last[:2])


def laid_out(picture: Picture, output: Output, detail: Detail, width: int = 0) -> Box:
    """Return the whole node at the output's width, with tiles of at least `width` columns."""
    maker = _Maker(picture, output, detail, width)
    online = [one for one in picture.tiles if one.place is not None]
    offline = [one for one in picture.tiles if one.place is None]
    levels = _levels(online)
    online.sort(key=lambda one: [level(_at(one)) for level in levels])
    titles, parts = maker.groups(online, levels, output.width)
    if titles:
        parts = [maker.frame(titles, parts, output.width)]
    if offline:
        title = f"offline {CpuSet(one.number for one in offline)}"
        parts.append(maker.frame([title], [maker.tile(one) for one in offline], output.width))
    return flow("node", parts, output.width)


def flow(kind: str, parts: Sequence[Box], width: int, gap: int = 0) -> Box:
    """Put boxes side by side, in as many rows as they need, about the same number in each."""
    each = max((one.width for one in parts), default=0)
    alike = all(one.width == each for one in parts)
    most = max(1, (width + gap) // (each + gap)) if alike else len(parts)
    most = -(-len(parts) // -(-len(parts) // most)) if parts else 1
    placed: list[Box] = []
    x = y = row = count = 0
    for one in parts:
        if placed and (x + one.width > width or count == most):
            x, y, row, count = 0, y + row, 0, 0
        placed.append(replace(one, x=x, y=y))
        x, row, count = x + one.width + gap, max(row, one.height), count + 1
    right = max((one.x + one.width for one in placed), default=0)
    return Box(kind, right, y + row, children=tuple(placed))


def cut(text: str, width: int, output: Output) -> str:
    """Return a text of at most `width` columns; what was cut off is marked by dots."""
    if cell_len(text) <= width and len(text) <= 2 * width:
        return text
    dots = "…" if output.unicode else ".."
    kept = text[: 2 * width]  # characters without a width of their own could be many
    if width <= len(dots):
        return kept[: fitting(kept, width)]
    return kept[: fitting(kept, width - len(dots))] + dots


def shortened(name: str, width: int, output: Output) -> str:
    """Return a name of at most `width` columns without its middle: what differs is at the end."""
    if cell_len(name) <= width and len(name) <= 2 * width:
        return name
    head = cut(name, width // 3, output)
    tail = name[: -2 * width - 1 : -1]  # from its end
    return head + tail[: fitting(tail, width - cell_len(head))][::-1]


def _levels(tiles: Sequence[Tile]) -> list[Level]:
    """Return the levels from the outside: a NUMA node may hold packages, or a package nodes."""
    packages: dict[int, set[int]] = {}
    for tile in tiles:
        packages.setdefault(_at(tile).node, set()).add(_at(tile).package)
    spread = any(len(found) > 1 for found in packages.values())
    return [_node, _package, _cache] if spread else [_package, _node, _cache]


def _at(tile: Tile) -> CpuPlace:
    if tile.place is None:
        raise AssertionError(f"pCPU {tile.number} is offline")
    return tile.place


def _by(tiles: Sequence[Tile], level: Level) -> list[list[Tile]]:
    return [list(members) for _, members in groupby(tiles, key=lambda one: level(_at(one)))]


class _Maker:
    """Makes the boxes of one picture at one level of detail."""

    def __init__(self, picture: Picture, output: Output, detail: Detail, width: int) -> None:
        self._output = output
        self._detail = detail
        digits = max((len(str(one.number)) for one in picture.tiles), default=1)
        keys = max((len(one.key) for one in picture.tiles), default=0)
        least = 1 + digits + (1 + keys if keys else 0) + 2  # sign, number, key, flag, space
        self._width = max(least, width)
        self._smt = any(one.place is not None and one.place.thread for one in picture.tiles)

    def groups(
        self, tiles: Sequence[Tile], levels: Sequence[Level], width: int
    ) -> tuple[list[str], list[Box]]:
        """Return the boxes of a level, and what the box around may add to its title."""
        if not levels:
            return [], self._cores(tiles)
        level, *inner = levels
        found = _by(tiles, level)
        if len(found) == 1 or (level is _cache and all(len(_by(f, _core)) == 1 for f in found)):
            titles, boxes = self.groups(tiles, inner, width)
            return [*([self._title(level, tiles)] if len(found) == 1 else []), *titles], boxes
        boxes = []
        for members in found:
            titles, parts = self.groups(members, inner, width - 2)
            boxes.append(self.frame([self._title(level, members), *titles], parts, width))
        return [], boxes

    def frame(self, titles: Sequence[str], parts: Sequence[Box], width: int) -> Box:
        """Return a framed box around others; it is as wide as its title where there is room."""
        inner = flow("group", parts, width - 2, 0 if parts[0].framed else 2)
        title = titles[0]
        for more in titles[1:]:
            longer = f"{title}{self._output.dot}{more}"
            title = longer if cell_len(longer) + 5 <= width else title
        title = cut(title, width - 5, self._output)
        wide = max(inner.width + 2, cell_len(title) + 5)
        return replace(inner, width=wide, height=inner.height + 2, framed=True, title=title)

    def tile(self, tile: Tile) -> Box:
        """Return the box of one pCPU."""
        framed = self._detail is Detail.OWNER
        width = self._width - 2  # sign and space, or both edges
        flags = flags_of(tile, self._output)[: None if self._detail > Detail.NUMBER else 1]
        head = f"{tile.number} {tile.key}".rstrip()
        lines = [head + flags.rjust(width - cell_len(head))]
        if framed:
            lines = [shortened(tile.owner, width, self._output), tile.roles, self._status(tile)]
        elif self._detail is Detail.ROLE:
            known = "" if tile.owner or len(tile.use) > width else tile.use.value
            lines.append(tile.roles or known)
        return Box(
            "pcpu",
            self._width,
            len(lines) + (2 if framed else 0),
            framed=framed,
            title=head if framed else "",
            lines=tuple(cut(one, width, self._output) for one in lines),
            tile=tile,
        )

    def _title(self, level: Level, tiles: Sequence[Tile]) -> str:
        number = level(_at(tiles[0]))
        if level is _cache:
            return f"last-level cache of {CpuSet(one.number for one in tiles)}"
        return f"{'package' if level is _package else 'NUMA node'} {number}"

    def _status(self, tile: Tile) -> str:
        """Return what is wrong in a word, how much foreign time there was, or else the use."""
        flag = flags_of(tile, self._output)[-1:]
        share = f"{flag}{percent(tile)}" if tile.foreign else ""
        kinds = {one.kind for one in tile.problems} - ({"foreign"} if share else set())
        if not kinds:
            return f"{share} foreign" if share else tile.use.value
        worst = "conflict" if "conflict" in kinds else min(kinds)
        return f"!{worst} {share}" if share else f"! {worst}"  # with its share it just fits

    def _cores(self, tiles: Sequence[Tile]) -> list[Box]:
        """Return a box per core; without SMT the tiles.

        Threads of a core are one below the other in a frame, or side by side.
        """
        if not self._smt:
            return [self.tile(one) for one in tiles]
        framed = self._detail is Detail.OWNER
        cores = []
        for members in _by(tiles, _core):
            threads = [self.tile(one) for one in members]
            core = flow("core", threads, self._width if framed else self._output.width - 2 * FRAMES)
            if framed:
                core = replace(
                    core,
                    width=core.width + 2,
                    height=core.height + 2,
                    framed=True,
                    title=f"core {_at(members[0]).core}",
                )
            cores.append(core)
        return cores


def flags_of(tile: Tile, output: Output) -> str:
    """Return the signs of problems and of foreign time; empty if there is neither."""
    foreign = ("▲" if output.unicode else "^") if tile.foreign else ""
    return ("!" if tile.problems else "") + foreign
