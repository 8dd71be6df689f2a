"""The node's interrupts: who handles them, how often they fired where, and where they may go."""

from __future__ import annotations

import os
import re
import resource
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from errno import EMFILE, ENFILE
from typing import Final, NamedTuple

from msgspec import Struct

from kata_pin.base.counters import Counts, InterruptKind
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import HostError, ParseError
from kata_pin.linux.files import STAT_BYTES, HostRoot, host_errors, read_bytes, read_once
from kata_pin.linux.kernel_text import check_size, clipped
from kata_pin.linux.proc import parse_mask

NO_NODE: Final = -1
"""The NUMA node of an interrupt that belongs to none (/proc/irq/N/node)."""

_VFIO: Final = re.compile(
    r"vfio-(?:msix?\[[0-9]+\]|intx)\(([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\)"
)


WIDTH: Final = 11
"""A number and the blank before it (kernel/irq/proc.c, show_interrupts)."""


class RowCounts(Mapping[int, int]):
    """The numbers of a row by pCPU, converted when they are asked for: most never are.

    `text` is the row's beginning, with its label, `places` says which number is a pCPU's. Each use
    raises ParseError for what is not one number per pCPU.
    """

    __slots__ = ("_places", "_start", "_words", "text")

    def __init__(self, places: Mapping[int, int], text: bytes) -> None:
        self._places = places
        self.text = text
        self._words: list[bytes] | None = None
        start = text.find(b":") + 1
        padded = len(text.rstrip()) - start == WIDTH * len(places)
        self._start = start if padded else None  # of the numbers, if all have the same width

    def of(self, text: bytes) -> RowCounts:
        """Return the counts of another text with the same columns."""
        return RowCounts(self._places, text)

    @property
    def words(self) -> list[bytes]:
        """Return the numbers as they stand there, in the order of the columns."""
        if self._words is None:
            words = self.text.partition(b":")[2].split()
            if len(words) != len(self._places) or not b"".join(words).isdigit():
                text = self.text[:80].decode("ascii", "replace")
                raise ParseError("not one number per CPU", source="/proc/interrupts", text=text)
            self._words = words
        return self._words

    def __getitem__(self, cpu: int) -> int:
        return int(self.words[self._places[cpu]])

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def since(self, before: Mapping[int, int], cpus: Iterable[int]) -> dict[int, int]:
        """Return how often it fired on these pCPUs since an earlier row, by pCPU if it did."""
        if not isinstance(before, RowCounts) or before._places is not self._places:
            return {}
        start, mine, theirs = self._start, self.text, before.text
        if start != before._start:
            start = None
        grown = {}
        for cpu in cpus:
            place = self._places.get(cpu)
            if place is None:
                continue
            if start is not None:  # most did not fire there: a look at the text is enough
                at = start + WIDTH * place
                if mine[at : at + WIDTH] == theirs[at : at + WIDTH]:
                    continue
            times = self._count(place) - before._count(place)
            if times > 0:
                grown[cpu] = times
        return grown

    def _count(self, place: int) -> int:
        """Return one number; if all have the same width, the others are not looked at."""
        start = self._start
        if start is None:
            return int(self.words[place])
        number = self.text[start + WIDTH * place : start + WIDTH * (place + 1)]
        try:
            return int(number)
        except ValueError:
            text = number.decode("ascii", "replace")
            raise ParseError("not a number", source="/proc/interrupts", text=text) from None


class InterruptRow(Struct, frozen=True):
    """One numbered row of /proc/interrupts.

    `text` is everything behind the counts: chip, trigger and handlers, with single spaces. With the
    number it identifies the interrupt: a device that is bound again can get an old number.
    `handlers` are the names of those who handle it, several where a line is shared. `counts` has
    how often it fired since boot, by pCPU that is online.
    """

    number: int
    text: str
    handlers: tuple[str, ...]
    counts: Mapping[int, int]

    @property
    def name(self) -> str:
        """Return what people know it by: its handlers, else its chip."""
        return ", ".join(self.handlers) or self.text

    @property
    def vfio(self) -> frozenset[str]:
        """Return the PCI addresses of devices that VFIO hands to VMs (vfio_pci_intrs.c)."""
        if "vfio-" not in self.text:
            return frozenset()
        return frozenset(found[1] for found in map(_VFIO.match, self.handlers) if found)


class Interrupt(Struct, frozen=True):
    """An interrupt and where it may go.

    `mask` are the pCPUs that it is allowed, `effective` the one that the kernel chose (it changes
    at the next interrupt, not when the mask is written; empty where unknown), `node` the device's
    NUMA node or NO_NODE. `managed`: the kernel places it itself and lets nobody move it; known from
    the file's mode since Linux 6.6 or so, before that only by an attempt.
    """

    row: InterruptRow
    mask: CpuSet
    effective: CpuSet = EMPTY
    node: int = NO_NODE
    managed: bool = False

    @property
    def number(self) -> int:
        """Return its number."""
        return self.row.number


# /proc/interrupts and /proc/softirqs: counts by CPU, of interrupts by what they are for.
#
# Facts are in proc_interrupts(5); arch/x86/kernel/irq.c, arch/arm64/kernel/smp.c, kernel/softirq.c.
# Both have a line of CPUs that are online, and rows that begin with a label.

MAX_TEXT: Final = 16 * 1024 * 1024
"""Most bytes that are read: 1,024 CPUs and 1,000 interrupts have 11 MiB."""

_LABELS: Final = {
    b"LOC": InterruptKind.TICK,
    b"RES": InterruptKind.RESCHEDULE,
    b"CAL": InterruptKind.CALL,
    b"PIN": InterruptKind.GUEST,
    b"NPI": InterruptKind.GUEST,
    b"PIW": InterruptKind.GUEST,
}
_WORDS: Final = (
    (b"Rescheduling interrupts", InterruptKind.RESCHEDULE),
    (b"Function call interrupts", InterruptKind.CALL),
    (b"arch_timer", InterruptKind.TICK),
    (b"Timer broadcast", InterruptKind.TICK),
)
"""How machines other than x86 describe theirs."""

_NO_KIND: Final = frozenset({b"TLB", b"ERR", b"MIS"})
"""Rows that are left out: TLB is part of CAL, the others do not count by CPU."""

_GAP: Final = re.compile(r" {2,}")
_LINE: Final = re.compile(r"[0-9]+(?:[ -][A-Za-z]+)*\Z")
"""What stands before the handlers: the line's number and its trigger, such as `1-edge`."""


def parse_interrupts(data: bytes, cpus: Collection[int]) -> dict[int, Counts]:
    """Return the interrupts of these CPUs by kind; an offline one is left out.

    Raises ParseError.
    """
    columns, rows = _table(data, "/proc/interrupts")
    wanted = [(place, cpu) for place, cpu in enumerate(columns) if cpu in cpus]
    found = {cpu: dict.fromkeys(InterruptKind, 0) for _, cpu in wanted}
    for label, rest in rows:
        words = rest.split()
        if label in _NO_KIND or len(words) < len(columns):
            continue
        kind = _kind(label, b" ".join(words[len(columns) :]))
        for place, cpu in wanted:
            found[cpu][kind] += _number(words[place], "/proc/interrupts")
    return dict(found)


def parse_columns(head: bytes) -> dict[int, int]:
    """Return the column of each pCPU that has one: those online; raises ParseError."""
    return {cpu: place for place, cpu in enumerate(_columns(head, "/proc/interrupts"))}


def is_numbered(line: bytes) -> bool:
    """Return whether a line is that of an interrupt with a number, which can have files."""
    label = line.partition(b":")[0].strip()
    return label.isdigit() and len(label) < 10


def parse_row(line: bytes, columns: Mapping[int, int]) -> InterruptRow:
    """Return a numbered row; raises ParseError.

    Handlers follow chip, number of the line and trigger after two spaces (kernel/irq/proc.c,
    show_interrupts); an interrupt without any has an empty tuple.
    """
    label, _, rest = line.partition(b":")
    *words, text = rest.split(None, len(columns)) if rest.strip() else (b"",)
    if len(words) < len(columns):
        raise ParseError("not one number per CPU", source="/proc/interrupts", text=clipped(label))
    if not b"".join(words).isdigit() or max(map(len, words), default=0) > 20:
        raise ParseError("not a number", source="/proc/interrupts", text=clipped(line))
    counts = RowCounts(columns, line[: len(line) - len(text)])
    parts = _GAP.split(text.decode("utf-8", "backslashreplace").strip())
    last = parts[-1] if len(parts) > 1 and not _LINE.match(parts[-1]) else ""
    handlers = tuple(last.split(", ")) if last else ()
    return InterruptRow(int(label), " ".join(" ".join(parts).split()), handlers, counts)


def recounted(row: InterruptRow, before: bytes, line: bytes) -> InterruptRow | None:
    """Return a row with the counts of a newer line; None if the line differs in more than these.

    `row` was parsed from `before` with the same columns. The kernel pads counts, so lines of one
    interrupt have one length.
    """
    known = row.counts
    if not isinstance(known, RowCounts) or len(line) != len(before):
        return None
    end = len(known.text)
    if line[end:] != before[end:]:
        return None
    return InterruptRow(row.number, row.text, row.handlers, known.of(line[:end]))


def parse_softirqs(data: bytes, cpus: Collection[int]) -> dict[int, dict[str, int]]:
    """Return the soft interrupts of these CPUs by name, such as `NET_RX`; raises ParseError."""
    columns, rows = _table(data, "/proc/softirqs")
    wanted = [(place, cpu) for place, cpu in enumerate(columns) if cpu in cpus]
    found: dict[int, dict[str, int]] = {cpu: {} for _, cpu in wanted}
    for label, rest in rows:
        words = rest.split()
        if len(words) != len(columns) or not label.replace(b"_", b"").isalpha():
            raise ParseError("not one number per CPU", source="/proc/softirqs", text=clipped(label))
        for place, cpu in wanted:
            found[cpu][label.decode("ascii")] = _number(words[place], "/proc/softirqs")
    return found


def _kind(label: bytes, description: bytes) -> InterruptKind:
    known = _LABELS.get(label)
    if known is None:
        known = next((kind for word, kind in _WORDS if word in description), None)
    if known is None:
        known = InterruptKind.DEVICE if label.isdigit() else InterruptKind.OTHER
    return known


def _table(data: bytes, source: str) -> tuple[list[int], list[tuple[bytes, bytes]]]:
    """Return the CPUs of the columns, and the rows by label."""
    check_size(data, MAX_TEXT, source)
    head, *lines = data.split(b"\n")
    columns = _columns(head, source)
    rows = []
    for line in lines:
        label, colon, rest = line.partition(b":")
        if colon:
            rows.append((label.strip(), rest))
    return columns, rows


def _columns(head: bytes, source: str) -> list[int]:
    names = head.split()
    if not names or not all(n.startswith(b"CPU") and n[3:].isdigit() and len(n) < 9 for n in names):
        raise ParseError("no line of CPUs", source=source, text=clipped(head))
    return [int(name[3:]) for name in names]


def _number(word: bytes, source: str) -> int:
    if not word.isdigit() or len(word) > 20:
        raise ParseError("not a number", source=source, text=clipped(word))
    return int(word)


MOST: Final = 4096
"""Most descriptors that are kept; further files are opened for each read."""

SHARE: Final = 4
"""The part of the process's descriptors that is kept at most: one in so many."""

NO_ROOM: Final = frozenset({EMFILE, ENFILE})
"""Errors that say nothing of a file: there is no descriptor left to open it with."""


class KeptFiles:
    """Files of /proc and /sys that are read again and again: their descriptors stay open.

    A read then costs a sixth. The kernel makes the content at each read from the beginning. A
    file of something that is gone gives EIO or ENODEV, or nothing. It is opened again then:
    there may be another one under its name.

    Whoever has one closes it.
    """

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MOST if soft == resource.RLIM_INFINITY else min(MOST, soft // SHARE)
        self._open: dict[str, int] = {}
        self._passing: set[str] = set()
        """What is opened for each read."""
        self.opened: set[str] = set()
        """Files that are new, or other ones under a name, until the reader clears this.

        One that is opened for each read is new the first time alone.
        """

    def read(self, path: str, size: int = STAT_BYTES) -> bytes:
        """Return what one read of a file gives; raises OSError."""
        fd = self._open.get(path)
        if fd is not None:
            try:
                data = os.pread(fd, size, 0)
            except OSError:
                data = b""
            if data:
                return data
            os.close(self._open.pop(path))
        if len(self._open) >= self._most:
            return self._pass(path, size)
        fd = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if path in self._passing:
            self._passing.remove(path)
        else:
            self.opened.add(path)
        return os.pread(fd, size, 0)

    def _pass(self, path: str, size: int) -> bytes:
        """Read a file that is not kept."""
        try:
            data = read_once(path, size)
        except OSError as error:
            if error.errno not in NO_ROOM:
                self._passing.discard(path)
            raise
        if path not in self._passing:
            self._passing.add(path)
            self.opened.add(path)
        return data

    def keep_only(self, paths: Collection[str]) -> None:
        """Close all others, and forget them."""
        self._passing.intersection_update(paths)
        self.opened.intersection_update(paths)
        for path in self._open.keys() - paths:
            os.close(self._open.pop(path))

    def close(self) -> None:
        """Close all."""
        self.keep_only(())


# /proc/interrupts; /proc/irq/N/{smp_affinity_list,effective_affinity_list,node}, readable by
# everybody (kernel/irq/proc.c). An interrupt that ends while it is read is left out.


class _Known(NamedTuple):
    """An interrupt as it was read last: its line and its mask's text, and what they meant."""

    path: str
    line: bytes
    mask: bytes
    interrupt: Interrupt


class InterruptTable:
    """Reads the node's interrupts again and again; what did not change is not parsed again.

    `version` grows with each change but of counters. `fired` are the interrupts whose counters
    changed since the read before, with their rows then; `born` are those that were set up since
    then, all of them after the first read. Whoever has one closes it.
    """

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._files = KeptFiles()
        self._known: dict[bytes, _Known] = {}
        self._head = b""
        self._columns: Mapping[int, int] = {}
        self.version = 0
        self.fired: list[tuple[InterruptRow, Interrupt]] = []
        self.born: list[Interrupt] = []

    def close(self) -> None:
        """Close the files that are read."""
        self._files.close()

    def read(self) -> tuple[Interrupt, ...]:
        """Return every interrupt that has files of its own, `effective` as it was first read.

        Raises HostError where /proc/interrupts cannot be read or no descriptor is left, ParseError
        for one that makes no sense.
        """
        path = self._root.proc("interrupts")
        with host_errors("read", path):
            head, *lines = read_bytes(path, MAX_TEXT).split(b"\n")
        if head != self._head:
            self._columns = parse_columns(head)
            self._head, self._known = head, {}
            self.version += 1
        before, found = self._known, {}
        self.fired, self.born = [], []
        for line in lines:
            label = line[: line.find(b":")]
            known = before.get(label)
            if known is None and not is_numbered(line):
                continue
            now = None if known is None else self._again(line, known)
            if now is None:
                now = self._new(line)
            if now is not None:
                found[label] = now
                if now.path in self._files.opened:  # one that is set up again has other files
                    self.born.append(now.interrupt)
        if found.keys() != before.keys():
            self.version += 1
            self._files.keep_only({one.path for one in found.values()})
        self._known = found
        self._files.opened.clear()  # only now: what a read that failed opened is born in the next
        return tuple(one.interrupt for one in found.values())

    def _new(self, line: bytes) -> _Known | None:
        """Return an interrupt that was not there before, None if it has no files."""
        row = parse_row(line, self._columns)
        path = self._root.proc("irq", row.number, "smp_affinity_list")
        try:
            text = self._files.read(path)
            mask = CpuSet.parse(text.decode("ascii", "replace"))
        except (OSError, ParseError) as error:
            _raise_for_room(error, path)
            return None
        self.version += 1
        where = _cpus(self._root, row.number, "effective_affinity_list")
        node, managed = _node(self._root, row.number), is_managed(self._root, row.number)
        return _Known(path, line, text, Interrupt(row, mask, where, node, managed))

    def _again(self, line: bytes, known: _Known) -> _Known | None:
        """Return an interrupt that is known; None if it is another one, or gone."""
        path, before, mask_text, one = known
        try:
            text = self._files.read(path)
            if path in self._files.opened:
                return None
            if text == mask_text:
                if line == before:
                    return known
                mask = one.mask
            else:
                mask = CpuSet.parse(text.decode("ascii", "replace"))
        except (OSError, ParseError) as error:
            _raise_for_room(error, path)
            return None
        row = one.row if line == before else recounted(one.row, before, line)
        if row is None:
            return None
        now = Interrupt(row, mask, one.effective, one.node, one.managed)
        if mask is not one.mask:
            self.version += 1
        if row is not one.row:
            self.fired.append((one.row, now))
        return _Known(path, line, text, now)


def read_interrupts(root: HostRoot) -> tuple[Interrupt, ...]:
    """Return every interrupt that has files of its own; raises HostError and ParseError."""
    with closing(InterruptTable(root)) as table:
        return table.read()


def default_mask(root: HostRoot) -> CpuSet:
    """Return the pCPUs of interrupts that are yet to be set up.

    Raises HostError where the file cannot be read, ParseError for one that is no mask.
    """
    path = root.proc("irq", "default_smp_affinity")
    with host_errors("read", path):
        return parse_mask(read_once(path), path)


def is_managed(root: HostRoot, number: int) -> bool:
    """Return whether nobody may move an interrupt, as the mode of its file says (see Interrupt)."""
    try:
        mode = os.stat(root.proc("irq", number, "smp_affinity_list")).st_mode
    except OSError:
        return False
    return not mode & stat.S_IWUSR


def _cpus(root: HostRoot, number: int, file: str) -> CpuSet:
    path = root.proc("irq", number, file)
    try:
        return CpuSet.parse(read_once(path).decode("ascii", "replace"))
    except (OSError, ParseError) as error:
        _raise_for_room(error, path)
        return EMPTY


def _node(root: HostRoot, number: int) -> int:
    path = root.proc("irq", number, "node")
    try:
        return int(read_once(path))
    except (OSError, ValueError) as error:
        _raise_for_room(error, path)
        return NO_NODE


def _raise_for_room(error: Exception, path: str) -> None:
    """Raise HostError where a file may be there: no descriptor was left to open it."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        raise HostError("read", path, error.errno or 0) from error
