"""A double of /proc/irq and /proc/interrupts: files of a tree, written as the kernel would take it.

For what this machine's own interrupts cannot show: managed ones, more pCPUs and nodes, errors. The
errors are those of Linux 6.1 and 6.12 as measured there (EIO, EPERM, EINVAL, ERANGE, EOVERFLOW);
tests/contract/test_tunables.py compares it with the running kernel.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from errno import EINVAL, ENOENT, EOVERFLOW, ERANGE
from pathlib import Path

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.linux.files import HostRoot
from kata_pin.linux.proc import parse_mask
from kata_pin.rights.broker.tunables import (
    TunableWrite,
    TunableWritten,
    parse_writes,
    render_writes,
)
from kata_pin.rights.calls import Calls


@dataclass
class Line:
    """An interrupt: its text, mask, NUMA node, and the errno of every write to it."""

    text: str
    mask: str
    node: int = -1
    refuses: int = 0
    mode: int = 0o644
    counts: dict[int, int] = field(default_factory=dict)
    effective: str = ""


@dataclass
class IrqTree(Calls):
    """The tree below `root`; `calls` of its own HostRoot write it."""

    root: Path
    cpus: int
    offline: set[int] = field(default_factory=set)
    writes: list[TunableWrite] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)
    """errnos of the next write to each name."""

    def __post_init__(self) -> None:
        self.lines: dict[int, Line] = {}
        self.unnumbered: dict[str, tuple[int, str]] = {}
        """Rows by label, such as LOC: how often each happened on each pCPU, and their text."""
        self.host = HostRoot(str(self.root), calls=self)
        self._irq = self.root / "proc" / "irq"
        self._irq.mkdir(parents=True)
        self.set_default(f"0-{self.cpus - 1}")
        self.render()

    def add_all(self, lines: Mapping[int, Line]) -> None:
        """Interrupts appear."""
        for number, line in lines.items():
            self._add(number, line)
        self.render()

    def add(self, number: int, line: Line) -> None:
        """An interrupt appears."""
        self.add_all({number: line})

    def _add(self, number: int, line: Line) -> None:
        self.lines[number] = line
        folder = self._irq / str(number)
        folder.mkdir(exist_ok=True)
        for name, text in (
            ("smp_affinity_list", line.mask),
            ("effective_affinity_list", line.effective),
            ("node", str(line.node)),
        ):
            (folder / name).write_text(f"{text}\n")
        (folder / "smp_affinity_list").chmod(line.mode)

    def remove(self, number: int) -> None:
        """It disappears."""
        del self.lines[number]
        for file in (self._irq / str(number)).iterdir():
            file.chmod(0o644)
            file.write_text("")  # who has it open reads nothing more; the kernel says EIO
            file.unlink()
        (self._irq / str(number)).rmdir()
        self.render()

    def set_mask(self, number: int, mask: str) -> None:
        """Somebody else writes its mask."""
        self.lines[number].mask = mask
        path = self._irq / str(number) / "smp_affinity_list"
        path.chmod(0o644)
        path.write_text(f"{mask}\n")
        path.chmod(self.lines[number].mode)

    def set_default(self, mask: str) -> None:
        """Somebody writes the default mask."""
        text = CpuSet.parse(mask).hex_mask()
        (self._irq / "default_smp_affinity").write_text(f"{text}\n")

    @property
    def default(self) -> str:
        """The default mask."""
        return str(parse_mask((self._irq / "default_smp_affinity").read_bytes(), "default"))

    @property
    def masks(self) -> dict[int, str]:
        """Every interrupt's mask."""
        return {number: line.mask for number, line in self.lines.items()}

    def render(self) -> None:
        """Write /proc/interrupts; columns are the pCPUs online."""
        online = [cpu for cpu in range(self.cpus) if cpu not in self.offline]
        rows = ["     " + "".join(f"{f'CPU{cpu}':>11}" for cpu in online)]
        for number, line in sorted(self.lines.items()):
            counts = "".join(f"{line.counts.get(cpu, 0):11}" for cpu in online)
            rows.append(f"{number:4}:{counts}  {line.text}")
        for label, (times, text) in self.unnumbered.items():
            rows.append(f"{label:>4}:{''.join(f'{times:11}' for _ in online)}   {text}")
        (self.root / "proc" / "interrupts").write_text("\n".join(rows) + "\n")

    # ---- the calls -----------------------------------------------------------------------

    def write_tunables(self, writes: Sequence[TunableWrite], root: str) -> list[TunableWritten]:
        """Write as the kernel would, after the broker's own checks."""
        assert root == str(self.root)
        return [self._write(one) for one in parse_writes(render_writes(writes))]

    def ask_irqbalance(self, pid: int, banned: str | None) -> socket.socket:
        """There is no irqbalance here."""
        raise OSError(ENOENT, os.strerror(ENOENT))

    def _write(self, one: TunableWrite) -> TunableWritten:
        self.writes.append(one)
        if one.kind == "default-mask":
            if len(one.value.replace(",", "")) > (self.cpus + 31) // 32 * 8:
                return TunableWritten(EOVERFLOW, CpuSet.parse(self.default).hex_mask())
            self.set_default(str(parse_mask(one.value.encode(), "default")))
            return TunableWritten(0, CpuSet.parse(self.default).hex_mask())
        line = self.lines.get(int(one.name))
        if line is None:
            return TunableWritten(ENOENT)
        errno = self.fails.pop(one.name, 0) or line.refuses
        try:
            cpus = CpuSet.parse(one.value)
        except ParseError:
            errno = errno or EINVAL
            cpus = CpuSet()
        if not errno and any(cpu >= self.cpus for cpu in cpus):
            errno = ERANGE
        if not errno and all(cpu in self.offline for cpu in cpus):
            errno = EINVAL
        if not errno:
            self.set_mask(int(one.name), str(cpus))
        return TunableWritten(errno, line.mask)
