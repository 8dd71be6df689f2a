"""`top`: samples of what threads and exclusive pCPUs do, and the view that keys change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.counters import Sample
from kata_pin.base.cpuset import CpuSet, union
from kata_pin.base.documents.document import Note
from kata_pin.base.documents.measured import (
    Interrupts,
    Missing,
    TopDocument,
    TopPcpu,
    TopRole,
    TopSandbox,
    TopThread,
)
from kata_pin.base.documents.state import Sandbox, State, Thread
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import NoteLevel, ThreadRole
from kata_pin.cli.reports import pcpus, words
from kata_pin.options.isolation.rates import Sampler, SampleRequest, Window

# The state document names the threads; what they do is read here, from files that anybody may read.

REFRESH_S: Final = 10.0
"""How often the sandboxes and their threads are asked for again."""

_FIGURES: Final = {
    "task/schedstat": ("cpu_percent", "wait_percent", "starving"),
    "task/sched": ("migrations",),
    "task/status": ("preemptions",),
    "schedstat": ("foreign_switches",),
    "stat": ("steal_percent",),
    "interrupts": ("interrupts",),
    "softirqs": ("softirqs",),
}
"""Which members of the document come from which file below /proc."""

ROLES: Final = tuple(role for role in ThreadRole if role is not ThreadRole.VCPU)


class _Owned(Struct, frozen=True):
    """An exclusive pCPU: its sandbox, and those of its threads that may run there."""

    cpu: int
    owner: Sandbox
    conflict: bool
    online: bool
    alone: tuple[ThreadKey, ...]
    roaming: tuple[ThreadKey, ...]


class _Plan(Struct, frozen=True):
    """What to read, of a state document."""

    state: State
    wanted: SampleRequest
    owned: tuple[_Owned, ...]
    spokesmen: Mapping[str, ThreadKey]
    """Of each sandbox the thread whose cgroups stand for all of it, by sandbox id."""


class Meter:
    """Makes top documents of the time since the former one; close it in the end."""

    def __init__(self, ask: Callable[[], State], sampler: Sampler, *, threads: bool) -> None:
        """`ask` returns the state document; `threads`: show overhead threads one by one."""
        self._ask = ask
        self._sampler = sampler
        self.threads = threads
        self._plan = _plan(ask(), threads=threads)
        self._asked_at = time.monotonic()
        self._last = sampler.sample(self._plan.wanted)

    def close(self) -> None:
        """Close what is open."""
        self._sampler.close()

    def document(self) -> TopDocument:
        """Return the document of the time since the last call; raises KataPinError."""
        now = self.sample()
        found = _document(self._plan, self._last, now, self._sampler.denied)
        self._last = now
        if time.monotonic() - self._asked_at > REFRESH_S:
            self.look_again()
        return found

    def sample(self) -> Sample:
        """Return what the kernel counts now."""
        return self._sampler.sample(self._plan.wanted)

    def look_again(self) -> None:
        """Ask for the sandboxes and their threads again; raises KataPinError."""
        self._plan = _plan(self._ask(), threads=self.threads)
        self._asked_at = time.monotonic()
        self._sampler.forget_cgroups()
        self._last = self.sample()

    def expand(self, *, threads: bool) -> None:
        """Show overhead threads one by one, or summed."""
        if threads != self.threads:
            self.threads = threads
            self._plan = _plan(self._plan.state, threads=threads)


def _key(thread: Thread) -> ThreadKey:
    return ThreadKey(thread.tgid, thread.tid, thread.starttime)


@lru_cache(maxsize=4096)
def _cpus(text: str) -> CpuSet:
    return pcpus.parse(text)


def _plan(state: State, *, threads: bool) -> _Plan:
    every = [thread for sandbox in state.sandboxes for thread in sandbox.threads]
    owned = tuple(_owned(state))
    spokesmen = {one.id: _key(_first(one.threads)) for one in state.sandboxes if one.threads}
    return _Plan(
        state,
        SampleRequest(
            threads=[_key(one) for one in every],
            detailed={_key(one) for one in every if threads or one.role == "vcpu"},
            cpus=[one.cpu for one in owned if one.online],
            on_cpus={key for one in owned for key in (*one.alone, *one.roaming)},
            in_cgroups=list(spokesmen.values()),
            cache_groups={one.id: one.cache.group for one in state.sandboxes if one.cache},
        ),
        owned,
        spokesmen,
    )


def _first(threads: Sequence[Thread]) -> Thread:
    """Return a vCPU thread, of which none may be throttled; else any."""
    return next((one for one in threads if one.role == "vcpu"), threads[0])


def _owned(state: State) -> Iterable[_Owned]:
    claims: dict[int, list[Sandbox]] = {}
    for sandbox in state.sandboxes:
        for cpu in _cpus(sandbox.exclusive):
            claims.setdefault(cpu, []).append(sandbox)
    online = _cpus(state.node.online)
    for cpu, owners in sorted(claims.items()):
        here = [t for t in owners[0].threads if cpu in _cpus(t.affinity)]
        alone = tuple(_key(t) for t in here if len(_cpus(t.affinity)) == 1)
        roaming = tuple(_key(t) for t in here if len(_cpus(t.affinity)) > 1)
        yield _Owned(cpu, owners[0], len(owners) > 1, cpu in online, alone, roaming)


def _document(plan: _Plan, before: Sample, after: Sample, denied: int) -> TopDocument:
    window = Window(before, after)
    throttled = {sandbox: window.throttled_percent(key) for sandbox, key in plan.spokesmen.items()}
    state = plan.state
    return TopDocument(
        time=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        daemon=state.daemon,
        hostname=state.node.hostname,
        seconds=round(window.seconds, 3),
        threads=len(after.tasks),
        sandboxes=tuple(
            _sandbox(one, window, plan.wanted, throttled.get(one.id)) for one in state.sandboxes
        ),
        pcpus=tuple(_pcpu(one, window, throttled.get(one.owner.id)) for one in plan.owned),
        missing=tuple(_missing(after.problems, throttled)),
        notes=tuple(_notes(plan, after, denied)),
    )


def _missing(
    problems: Mapping[str, str], throttled: Mapping[str, float | None]
) -> Iterable[Missing]:
    for file, reason in problems.items():
        for figure in _FIGURES[file]:
            yield Missing(figure, reason)
    if throttled and all(one is None for one in throttled.values()):
        yield Missing("throttled_percent", "no cpu.stat of their cgroups can be read")


def _notes(plan: _Plan, sample: Sample, denied: int) -> Iterable[Note]:
    if not plan.state.daemon.running and os.geteuid():
        text = "sandboxes may be missing: without the daemon only root can verify VMM processes"
        yield Note("not-root", f"{text}; run as root", NoteLevel.WARNING)
    if denied:
        text = f"{denied} threads cannot be read (hidepid, or a security module); run as root"
        yield Note("threads-denied", text, NoteLevel.WARNING)
    elif plan.wanted.threads and not sample.tasks and not sample.problems:
        text = "no thread of any sandbox can be seen in /proc: hidepid hides them"
        yield Note("threads-hidden", f"{text}; run as root", NoteLevel.WARNING)


def _sandbox(
    sandbox: Sandbox, window: Window, wanted: SampleRequest, throttled: float | None
) -> TopSandbox:
    vcpus = [_thread(one, window) for one in sandbox.threads if one.role == "vcpu"]
    waits = [one.wait_percent for one in vcpus if one.wait_percent is not None]
    rates = (window.tasks.get(_key(one)) for one in sandbox.threads)
    use, bandwidth = window.cache(sandbox.id)
    return TopSandbox(
        id=sandbox.id,
        pod=sandbox.pod,
        state=sandbox.state,
        mask=sandbox.mask,
        cpu_percent=_total(one.cpu_percent for one in rates if one is not None),
        wait_percent=max(waits, default=None),
        throttled_percent=_rounded(throttled),
        vcpus=tuple(sorted(vcpus, key=lambda one: (len(one.label), one.label, one.tid))),
        overhead=tuple(_overhead(sandbox, window, wanted)),
        cache_group=sandbox.cache.group if sandbox.cache else "",
        l3_bytes=use.occupancy if use else None,
        memory_bytes_per_s=_rounded(bandwidth.total),
        local_bytes_per_s=_rounded(bandwidth.local),
    )


def _overhead(sandbox: Sandbox, window: Window, wanted: SampleRequest) -> Iterable[TopRole]:
    by_role: dict[str, list[Thread]] = {}
    for thread in sandbox.threads:
        by_role.setdefault(thread.role, []).append(thread)
    for role in ROLES:
        threads = by_role.get(role)
        if threads is None:
            continue
        rates = [window.tasks[key] for key in map(_key, threads) if key in window.tasks]
        expanded = _key(threads[0]) in wanted.detailed
        yield TopRole(
            role=role,
            count=len(threads),
            cpus=str(union(_cpus(text) for text in {one.affinity for one in threads})),
            drifting=sum(1 for one in threads if one.state == "drift"),
            cpu_percent=_total(one.cpu_percent for one in rates),
            wait_percent=_total(one.wait_percent for one in rates),
            threads=tuple(_thread(one, window) for one in threads) if expanded else (),
        )


def _thread(thread: Thread, window: Window) -> TopThread:
    rates = window.tasks.get(_key(thread))
    return TopThread(
        tid=thread.tid,
        comm=thread.comm,
        label=thread.label,
        cpus=thread.affinity,
        state=thread.state,
        cpu_percent=_rounded(rates.cpu_percent) if rates else None,
        wait_percent=_rounded(rates.wait_percent) if rates else None,
        starving=bool(rates and rates.starving),
        preemptions=_rounded(rates.preemptions) if rates else None,
        migrations=_rounded(rates.migrations) if rates else None,
        last_cpu=rates.last_cpu if rates else None,
    )


def _pcpu(one: _Owned, window: Window, throttled: float | None) -> TopPcpu:
    rates = window.cpu(one.cpu, alone=one.alone, roaming=one.roaming, throttled=throttled or 0)
    if not one.owner.threads:  # those not known cannot be told from others
        rates = rates._replace(own_percent=None, foreign_percent=None, foreign_switches=None)
    counts = rates.interrupts
    return TopPcpu(
        cpu=one.cpu,
        sandbox=one.owner.id,
        pod=one.owner.pod,
        online=one.online,
        conflict=one.conflict,
        own_percent=_rounded(rates.own_percent),
        foreign_percent=_rounded(rates.foreign_percent, 3) if one.online else None,
        foreign_switches=_rounded(rates.foreign_switches),
        throttled_percent=_rounded(throttled),
        steal_percent=_rounded(rates.steal_percent),
        interrupts=(
            None if counts is None else Interrupts(**{k: round(n, 1) for k, n in counts.items()})
        ),
        softirqs=(
            None if rates.softirqs is None else {k: round(n, 1) for k, n in rates.softirqs.items()}
        ),
    )


def _total(values: Iterable[float]) -> float | None:
    """Return the sum, None if there is nothing to add."""
    known = list(values)
    return round(sum(known), 2) if known else None


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


# What `top` shows of its samples: order, filter, pause, help, position; and what keys do.

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


class View(Struct, frozen=True):
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
