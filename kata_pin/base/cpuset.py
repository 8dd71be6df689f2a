"""Sets of CPU numbers, and what the host's CPUs are: cores, packages, NUMA nodes, caches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Final

from msgspec import Struct, field

from kata_pin.base.errors import ParseError

# A set of CPU numbers, immutable, with Linux's list format.
#
# Bounded before anything is expanded: a text from a pod or a file can name any number, and a range
# such as ``0-99999999999`` must cost nothing (D17).

MAX_CPU: Final = 8191
"""Highest CPU number accepted: the largest NR_CPUS that mainline allows (x86, MAXSMP) less one."""

MAX_TEXT: Final = 32 * 1024
"""Longest CPU list accepted, in characters: 4,096 separate CPUs fit."""

_RANGE: Final = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?\Z")


class CpuSet:
    """An immutable set of CPU numbers 0 to MAX_CPU, ordered when iterated.

    Also used for NUMA node lists (``cpuset.mems``), which have the same syntax.
    """

    __slots__ = ("_bits",)
    _bits: int

    def __init__(self, cpus: Iterable[int] = ()) -> None:
        """Take CPU numbers in any order; raise ParseError for one outside 0..MAX_CPU."""
        bits = 0
        for cpu in cpus:
            if not 0 <= cpu <= MAX_CPU:
                raise ParseError(f"CPU number out of range 0-{MAX_CPU}", text=str(cpu))
            bits |= 1 << cpu
        self._bits = bits

    @classmethod
    def from_bits(cls, bits: int) -> CpuSet:
        """Take an integer whose bit N says that CPU N is in the set."""
        if bits < 0 or bits.bit_length() > MAX_CPU + 1:
            raise ParseError(f"CPU number out of range 0-{MAX_CPU}", source="bits")
        return _of(bits)

    @classmethod
    def parse(cls, text: str, *, source: str = "cpu list") -> CpuSet:
        """Read Linux's list format, such as ``0-3,8`` (cpuset(7)); an empty text is the empty set.

        Surrounding white space and a final newline are ignored. Reversed ranges, strides
        (``0-7:2/4``), signs and empty elements are refused with ParseError.
        """
        if len(text) > MAX_TEXT:
            raise ParseError(f"longer than {MAX_TEXT} characters", source=source, text=text)
        body = text.strip()
        if not body:
            return EMPTY
        bits = 0
        for element in body.split(","):
            match = _RANGE.match(element)
            if match is None:
                raise ParseError("not a CPU number or range", source=source, text=element or body)
            low = int(match[1])
            high = low if match[2] is None else int(match[2])
            if high > MAX_CPU or low > MAX_CPU:
                raise ParseError(f"CPU above {MAX_CPU}", source=source, text=element)
            if high < low:
                raise ParseError("range runs backwards", source=source, text=element)
            bits |= ((1 << (high - low + 1)) - 1) << low
        return cls.from_bits(bits)

    @property
    def bits(self) -> int:
        """The set as an integer, bit N for CPU N."""
        return self._bits

    @property
    def first(self) -> int:
        """Return the lowest CPU; ValueError when empty."""
        if not self._bits:
            raise ValueError("an empty CpuSet has no first CPU")
        return (self._bits & -self._bits).bit_length() - 1

    def ranges(self) -> list[tuple[int, int]]:
        """Return maximal runs (low, high), ascending."""
        runs: list[tuple[int, int]] = []
        bits, low = self._bits, 0
        while bits:
            gap = (bits & -bits).bit_length() - 1
            bits >>= gap
            low += gap
            size = (~bits & (bits + 1)).bit_length() - 1  # how many ones the number ends with
            bits >>= size
            runs.append((low, low + size - 1))
            low += size
        return runs

    def hex_mask(self) -> str:
        """Return the mask that files of the kernel take: groups of eight digits (bitmap_parse).

        It has no more digits than it needs: the kernel refuses those beyond its CPUs (EOVERFLOW).
        """
        digits = f"{self._bits:x}"
        head = len(digits) % 8
        groups = [digits[:head]] if head else []
        return ",".join([*groups, *(digits[at : at + 8] for at in range(head, len(digits), 8))])

    def __iter__(self) -> Iterator[int]:
        bits = self._bits
        while bits:
            low = bits & -bits
            yield low.bit_length() - 1
            bits ^= low

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __bool__(self) -> bool:
        return self._bits != 0

    def __contains__(self, cpu: object) -> bool:
        return isinstance(cpu, int) and cpu >= 0 and bool(self._bits >> cpu & 1)

    def __or__(self, other: CpuSet) -> CpuSet:
        return _of(self._bits | other._bits)

    def __and__(self, other: CpuSet) -> CpuSet:
        return _of(self._bits & other._bits)

    def __sub__(self, other: CpuSet) -> CpuSet:
        return _of(self._bits & ~other._bits)

    def __le__(self, other: CpuSet) -> bool:
        return self._bits & ~other._bits == 0

    def __lt__(self, other: CpuSet) -> bool:
        mine, theirs = self._bits, other._bits
        return mine != theirs and mine & ~theirs == 0

    def __ge__(self, other: CpuSet) -> bool:
        return other <= self

    def __gt__(self, other: CpuSet) -> bool:
        return other < self

    def isdisjoint(self, other: CpuSet) -> bool:
        """Return whether no CPU is in both."""
        return self._bits & other._bits == 0

    def __eq__(self, other: object) -> bool:
        return self._bits == other._bits if isinstance(other, CpuSet) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bits)

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return CpuSet.from_bits, (self._bits,)

    def __str__(self) -> str:
        return _text(self._bits)

    def __repr__(self) -> str:
        return f"CpuSet({str(self)!r})"


def _of(bits: int) -> CpuSet:
    """Return the set of these bits, which are known to be in range."""
    new = CpuSet.__new__(CpuSet)
    new._bits = bits
    return new


@lru_cache(maxsize=1024)
def _text(bits: int) -> str:
    """Return a set in Linux's list format: a node has few distinct ones, which documents repeat."""
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in _of(bits).ranges())


EMPTY: Final = CpuSet()


def union(sets: Iterable[CpuSet]) -> CpuSet:
    """Return the union of any number of sets."""
    bits = 0
    for one in sets:
        bits |= one._bits
    return _of(bits)


def named_pcpus(cpus: CpuSet) -> str:
    """Return them in words, such as `pCPU 4` or `pCPUs 4-7`."""
    return f"pCPU {cpus}" if len(cpus) == 1 else f"pCPUs {cpus}"


def pcpus_are(cpus: CpuSet) -> str:
    """Return the same as the start of a sentence: `pCPU 4 is` or `pCPUs 4-7 are`."""
    return f"{named_pcpus(cpus)} {'is' if len(cpus) == 1 else 'are'}"


# What the host's CPUs are: numbers, cores, packages, NUMA nodes, caches, and what is online.


class CpuPlace(Struct, frozen=True):
    """One online pCPU and its place in the topology."""

    cpu: int  #: the pCPU
    node: int  #: NUMA node
    package: int  #: package (socket)
    llc: int  #: lowest pCPU that shares the last-level cache
    core: int  #: lowest pCPU of the core
    thread: int  #: index among the core's siblings
    kind: str  #: core type of a hybrid CPU, else empty

    @property
    def order(self) -> tuple[int, int, int, int, int, int]:
        """Sort key of topology order: node, package, LLC, core, thread (D10)."""
        return (self.node, self.package, self.llc, self.core, self.thread, self.cpu)


class HostTopology(Struct, frozen=True, dict=True):
    """The CPUs of a host.

    Offline CPUs have no topology in sysfs, so `cpus` holds those that are online; `present` and
    `online` are the kernel's own lists. `isolated` is what no scheduler domain balances.
    """

    cpus: tuple[CpuPlace, ...]
    online: CpuSet
    present: CpuSet
    isolated: CpuSet = EMPTY
    nohz_full: CpuSet = EMPTY
    distances: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def _by_number(self) -> dict[int, CpuPlace]:
        return {cpu.cpu: cpu for cpu in self.cpus}

    @cached_property
    def nodes(self) -> dict[int, CpuSet]:
        """Online CPUs of each NUMA node that has any; one node 0 on a host without NUMA."""
        return _group(self.cpus, "node")

    @cached_property
    def packages(self) -> dict[int, CpuSet]:
        """Online CPUs of each package."""
        return _group(self.cpus, "package")

    @cached_property
    def llcs(self) -> dict[int, CpuSet]:
        """Online CPUs of each last-level cache."""
        return _group(self.cpus, "llc")

    @cached_property
    def cores(self) -> dict[int, CpuSet]:
        """Online CPUs of each core."""
        return _group(self.cpus, "core")

    def get(self, cpu: int) -> CpuPlace | None:
        """Return the CPU's place, None if it is offline or unknown."""
        return self._by_number.get(cpu)

    def siblings(self, cpu: int) -> CpuSet:
        """Return all online threads of the CPU's core, itself included."""
        found = self._by_number.get(cpu)
        return EMPTY if found is None else self.cores[found.core]

    def node_of(self, cpu: int) -> int | None:
        """Return the NUMA node of an online CPU."""
        found = self._by_number.get(cpu)
        return None if found is None else found.node

    def in_order(self, cpus: Iterable[int]) -> list[int]:
        """Return the CPUs in topology order; unknown ones follow by number."""
        far = 1 << 30
        return sorted(
            cpus,
            key=lambda n: (
                self._by_number[n].order if n in self._by_number else (far, far, far, far, far, n)
            ),
        )


def _group(cpus: Iterable[CpuPlace], attribute: str) -> dict[int, CpuSet]:
    groups: dict[int, list[int]] = {}
    for cpu in cpus:
        groups.setdefault(getattr(cpu, attribute), []).append(cpu.cpu)
    return {key: CpuSet(groups[key]) for key in sorted(groups)}
