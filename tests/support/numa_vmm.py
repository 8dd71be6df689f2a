"""A VMM's memory on NUMA nodes, and move_pages(2) as the kernel makes it (mm/migrate.c).

tests/contract/test_move_pages.py compares what one NUMA node shows; moves between two are in no
contract, because no machine of ours has a second one (the lab's has: tests/e2e/test_memory.py).

Pages are refused one by one while they are looked up (EBUSY, EFAULT, ENOENT, EACCES); what was
found until then moves at once. A page that is pinned fails only then: the call ends there, the
pages after it were not tried, and it has no status. A huge page moves with any of its small pages,
and while it is on its way the others are busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from errno import EACCES, EBUSY, ENOENT, ENOMEM
from typing import Final

from kata_pin.rights.broker.pages import PagesMoved, PageWindow, move_window
from kata_pin.rights.calls import Calls

BASE: Final = 0x7F00_0000_0000
SMALL: Final = 4096
HUGE: Final = 1 << 21
MOVE_ALL: Final = 1 << 2
_UNTOUCHED: Final = -(1 << 20)


class NumaVmm(Calls):
    """One mapping of a guest's memory: `nodes` has the node of each page that is there."""

    def __init__(
        self, pages: int, node: int, *, size: int = SMALL, policy: str = "default"
    ) -> None:
        self.size = size
        self.pages = pages
        self.policy = policy
        self.backing = ""
        self.shared = False
        self.nodes: dict[int, int] = {BASE + number * size: node for number in range(pages)}
        self.refusals: dict[int, int] = {}
        """The errno of pages that cannot be isolated."""
        self.pinned: set[int] = set()
        self.transparent = False
        """Whether small pages are parts of huge ones."""
        self.room: dict[int, int] = {}
        """How many more pages a node takes; without an entry, any number."""
        self.error = 0
        """The errno of every call that moves."""
        self.hangs = False
        self.other_mappings = 0
        """How many mappings of libraries it has beside."""
        self.windows: list[PageWindow] = []
        self.moves = 0
        """System calls that moved, or tried to."""

    def address(self, number: int) -> int:
        """Return the address of a page."""
        return BASE + number * self.size

    def on(self, node: int) -> int:
        """Return how many pages are on a node."""
        return sum(1 for one in self.nodes.values() if one == node)

    # ---- Calls ---------------------------------------------------------------------------

    async def move_pages(self, window: PageWindow, deadline_s: float) -> PagesMoved:
        """See Calls."""
        await asyncio.sleep(0)
        self.windows.append(window)
        if self.hangs:
            raise TimeoutError
        return move_window(window, self.call)

    async def read_slow(
        self, requests: Sequence[tuple[int, str, int]], deadline_s: float
    ) -> Mapping[tuple[int, str], bytes | OSError]:
        """See Calls."""
        await asyncio.sleep(0)
        texts: dict[str, str] = {"numa_maps": self.numa_maps(), "maps": self.maps()}
        return {(pid, file): texts[file].encode() for pid, file, _ in requests}

    def numa_maps(self) -> str:
        """Return its text."""
        words = [f"{BASE:x}", self.policy]
        words += [f"file={self.backing}"] if self.backing else []
        words += ["huge"] if self.size > SMALL else []
        words += [f"N{one}={self.on(one)}" for one in sorted(set(self.nodes.values()))]
        library = f"7fff00000000 default file=/usr/lib/libc.so.6 N1=90 kernelpagesize_kB={4}\n"
        file = "file=/usr/lib/libc.so.6 N1=1 kernelpagesize_kB=4"
        others = (f"{at:x} default {file}\n" for at in self._others)
        own = " ".join([*words, f"kernelpagesize_kB={self.size // 1024}"])
        return "".join((*others, own, "\n", library))

    def maps(self) -> str:
        """Return its text."""
        end = BASE + self.pages * self.size
        own = f"{BASE:x}-{end:x} rw-{'s' if self.shared else 'p'} 00000000 00:00 0 {self.backing}\n"
        file = "r-xp 00000000 fe:00 12  /usr/lib/libc.so.6"
        others = (f"{at:x}-{at + SMALL:x} {file}\n" for at in self._others)
        return (
            "".join(others)
            + own
            + "7fff00000000-7fff0005a000 r-xp 00000000 fe:00 12  /usr/lib/libc.so.6\n"
        )

    @property
    def _others(self) -> range:
        return range(SMALL * 16, SMALL * 16 + self.other_mappings * 2 * SMALL, 2 * SMALL)

    # ---- the kernel ----------------------------------------------------------------------

    def call(self, pid: int, addresses: Sequence[int], node: int | None, flags: int) -> list[int]:
        """Be move_pages(2); see broker.pages.Call."""
        if node is None:
            return [self.nodes.get(one, -ENOENT) for one in addresses]
        self.moves += 1
        if self.error:
            raise OSError(self.error, "refused")
        statuses = [_UNTOUCHED] * len(addresses)
        queued: dict[int, list[int]] = {}
        for at, address in enumerate(addresses):
            head = address - address % HUGE if self.transparent else address
            status = self._lookup(address, head, node, flags, queued)
            if status is None:
                queued.setdefault(head, []).append(at)
                continue
            statuses[at] = status
            if not self._flush(queued, node, statuses):
                return statuses
        self._flush(queued, node, statuses)
        return statuses

    def _lookup(
        self, address: int, head: int, node: int, flags: int, queued: Mapping[int, list[int]]
    ) -> int | None:
        """Return the status of a page at once; None: it is queued."""
        if address not in self.nodes:
            return -ENOENT
        if self.nodes[address] == node:
            return node
        if address in self.refusals:
            return -self.refusals[address]
        if self.shared and not flags & MOVE_ALL:
            return -EACCES
        return -EBUSY if head in queued else None

    def _flush(self, queued: dict[int, list[int]], node: int, statuses: list[int]) -> bool:
        """Move what is queued; False where the call ends, OSError where there is no memory."""
        good = True
        for head, places in queued.items():
            members = [
                one
                for one in (range(head, head + HUGE, SMALL) if self.transparent else [head])
                if one in self.nodes
            ]
            if self.room.get(node, len(members)) < len(members):
                raise OSError(ENOMEM, "no memory")
            if self.pinned & set(members):
                good = False
                continue
            if node in self.room:
                self.room[node] -= len(members)
            self.nodes |= dict.fromkeys(members, node)
            for at in places:
                statuses[at] = node
        queued.clear()
        return good
