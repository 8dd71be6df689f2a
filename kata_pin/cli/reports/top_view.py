"""What `top` shows of its samples: order, filter, pause, help, position; and what keys do. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kata_pin.cli.reports import words
from kata_pin.model.reports.top import TopDocument, TopPcpu, TopSandbox

MAX_FILTER: Final = 64

ORDERS: Final = ("wait", "cpu", "preemptions", "migrations", "name")
"""What rows are sorted by, in the order in which the key walks through."""

_PCPU_FIGURES: Final = {
    "wait": "foreign_percent",
    "cpu": "own_percent",
    "preemptions": "foreign_switches",
    "migrations": "foreign_switches",
}

KEYS: Final = (
    ("q, Ctrl-C", "quit"),
    ("s / S", "sort by the next / former: wait, CPU, preemptions, migrations, name"),
    ("r", "reverse the order"),
    ("/", "show only pods and ids with a text; Enter keeps it, Esc drops it"),
    ("e", "overhead threads one by one, or summed by role"),
    ("c", "exclusive pCPUs above the sandboxes, or below"),
    ("p, Space", "pause, go on"),
    ("Up Down k j", "scroll by a row"),
    ("PgUp PgDn", "scroll by a screen; Home End to the first or last row"),
    ("h, ?", "this help"),
)
"""The keys and what they do, for the help."""

MEANINGS: Final = (
    ("CPU%", "time that a thread ran, in per cent of one pCPU"),
    ("WAIT%", "time that it was ready and got no pCPU; of a vCPU what its guest sees as steal"),
    ("PREEMPT/s", "times per second that it lost its pCPU although it was ready"),
    ("MIGR/s", "times per second that it moved to another pCPU"),
    ("LAST-CPU", "pCPU that it ran on last; * it has not run since its affinity was set"),
    ("OWN%", "threads of the sandbox that may run only on this pCPU"),
    ("FOREIGN%", "anybody else on this exclusive pCPU, at least; `kata-pin prove` names them"),
    ("FSWITCH/s", "times per second that anybody else came onto it, at least"),
    ("THROTTLED%", "time in which a CPU quota stopped the sandbox; 0 on exclusive pCPUs"),
    ("L3", "bytes of the L3 caches that the sandbox's threads fill (resctrl)"),
    ("MEM/s", "bytes per second between these caches and memory (resctrl)"),
    ("n/a", "this node cannot tell; the reason is below the tables"),
)
"""The columns and what they mean, for the help."""


@dataclass(frozen=True)
class View:
    """What is shown and how; `typing` is the filter while it is typed, None else."""

    order: str = ORDERS[0]
    reverse: bool = False
    filter: str = ""
    typing: str | None = None
    paused: bool = False
    help: bool = False
    threads: bool = False
    cpus_first: bool = False
    top: int = 0
    ended: bool = False

    @property
    def wanted(self) -> str:
        """The text that pods or ids must have, as far as it is typed."""
        return self.filter if self.typing is None else self.typing

    def pressed(self, key: str, page: int) -> View:
        """Return the view after a key; `page` is how many rows fit."""
        if self.typing is not None:
            return self._typed(key)
        change = _CHANGES.get(key)
        if change is not None:
            return change(self)
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pgup": -page, "pgdn": page}
        if key in steps:
            return replace(self, top=max(0, self.top + steps[key]))
        return self

    def _typed(self, key: str) -> View:
        text = self.typing or ""
        if key == "enter":
            return replace(self, filter=text, typing=None, top=0)
        if key == "esc":
            return replace(self, filter="", typing=None, top=0)
        if key == "backspace":
            return replace(self, typing=text[:-1], top=0)
        key = " " if key == "space" else key
        if len(key) == 1 and key.isprintable() and len(text) < MAX_FILTER:
            return replace(self, typing=text + key, top=0)
        return self

    def bounded(self, rows: int, page: int) -> View:
        """Return the view scrolled no further than its last page."""
        return replace(self, top=max(0, min(self.top, rows - page)))

    def _sorted_by_next(self, step: int) -> View:
        place = (ORDERS.index(self.order) + step) % len(ORDERS)
        return replace(self, order=ORDERS[place], top=0)

    def sandboxes(self, document: TopDocument) -> Sequence[TopSandbox]:
        """Return the sandboxes that are shown, in their order."""
        chosen = [one for one in document.sandboxes if self._has(one.pod, one.id)]
        if self.order == "name":
            return sorted(chosen, key=words.owner, reverse=self.reverse)
        return sorted(
            chosen, key=lambda one: (self._rank(_figure(one, self.order)), words.owner(one))
        )

    def pcpus(self, document: TopDocument) -> Sequence[TopPcpu]:
        """Return the exclusive pCPUs that are shown, in their order."""
        chosen = [one for one in document.pcpus if self._has(one.pod, one.sandbox)]
        if self.order == "name":
            return sorted(chosen, key=lambda one: one.cpu, reverse=self.reverse)
        member = _PCPU_FIGURES[self.order]
        return sorted(chosen, key=lambda one: (self._rank(getattr(one, member)), one.cpu))

    def _has(self, pod: str, sandbox_id: str) -> bool:
        wanted = self.wanted.casefold()
        return wanted in pod.casefold() or wanted in sandbox_id

    def _rank(self, figure: float | None) -> tuple[bool, float]:
        """Return what figures are sorted by: the greatest first, unknown ones last.

        Differences below a tenth are noise: they do not make rows change places.
        """
        if figure is None:
            return True, 0.0
        return False, round(figure, 1) * (1 if self.reverse else -1)


def _figure(sandbox: TopSandbox, order: str) -> float | None:
    if order == "wait":
        return sandbox.wait_percent
    if order == "cpu":
        return sandbox.cpu_percent
    known = (one.preemptions if order == "preemptions" else one.migrations for one in sandbox.vcpus)
    found = [one for one in known if one is not None]
    return sum(found) if found else None


_CHANGES: Final[dict[str, Callable[[View], View]]] = {
    "q": lambda view: replace(view, ended=True),
    "s": lambda view: view._sorted_by_next(1),
    "S": lambda view: view._sorted_by_next(-1),
    "r": lambda view: replace(view, reverse=not view.reverse, top=0),
    "/": lambda view: replace(view, typing=view.filter, top=0, help=False),
    "e": lambda view: replace(view, threads=not view.threads),
    "c": lambda view: replace(view, cpus_first=not view.cpus_first, top=0),
    "p": lambda view: replace(view, paused=not view.paused),
    "space": lambda view: replace(view, paused=not view.paused),
    "home": lambda view: replace(view, top=0),
    "end": lambda view: replace(view, top=1_000_000),
    "h": lambda view: replace(view, help=not view.help, top=0),
    "?": lambda view: replace(view, help=not view.help, top=0),
    "esc": lambda view: replace(view, help=False, filter="", top=0),
}

_SEQUENCES: Final = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[5~": "pgup", "\x1b[6~": "pgdn",
    "\x1b[H": "home", "\x1b[F": "end", "\x1b[1~": "home", "\x1b[4~": "end",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOH": "home", "\x1bOF": "end",
    "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", " ": "space",
    "\x1b": "esc", "\x03": "q",
}  # fmt: skip


def keys(text: str) -> Iterator[str]:
    """Yield the keys that a terminal's input is; unknown sequences are passed over."""
    at = 0
    while at < len(text):
        length = _sequence(text, at)
        word = text[at : at + length]
        at += length
        name = _SEQUENCES.get(word, word if length == 1 and word.isprintable() else "")
        if name:
            yield name


def _sequence(text: str, at: int) -> int:
    """Return how long the sequence is that begins here (ECMA-48: CSI ends with a byte @ to ~)."""
    if text[at] != "\x1b" or at + 1 == len(text) or text[at + 1] not in "[O":
        return 1
    if text[at + 1] == "O":
        return min(3, len(text) - at)
    end = at + 2
    while end < len(text) and not "@" <= text[end] <= "~":
        end += 1
    return end + 1 - at
