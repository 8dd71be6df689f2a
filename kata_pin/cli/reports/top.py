"""`top`: what the threads of sandboxes and their exclusive pCPUs do, sample by sample.

The state document names the threads; what they do is read here, from files that anybody may read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from kata_pin.cli.reports import pcpus
from kata_pin.host.measure.sampler import Sampler, Wanted
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.measured.samples import Sample
from kata_pin.model.reports import Note
from kata_pin.model.reports.sandbox import Sandbox, Thread
from kata_pin.model.reports.state import State
from kata_pin.model.reports.top import (
    Interrupts,
    Missing,
    TopDocument,
    TopPcpu,
    TopRole,
    TopSandbox,
    TopThread,
)
from kata_pin.model.thread import ThreadKey
from kata_pin.policy.isolation.rates import Window

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

ROLES: Final = ("iothread", "emulator", "vhost", "virtiofsd", "kvm", "shim")


@dataclass(frozen=True)
class _Owned:
    """An exclusive pCPU: its sandbox, and those of its threads that may run there."""

    cpu: int
    owner: Sandbox
    conflict: bool
    online: bool
    alone: tuple[ThreadKey, ...]
    roaming: tuple[ThreadKey, ...]


@dataclass(frozen=True)
class _Plan:
    """What to read, of a state document."""

    state: State
    wanted: Wanted
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
        Wanted(
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
        yield Note("not-root", f"{text}; run as root", "warning")
    if denied:
        text = f"{denied} threads may not be read (hidepid, or a security module); run as root"
        yield Note("threads-denied", text, "warning")
    elif plan.wanted.threads and not sample.tasks and not sample.problems:
        text = "no thread of any sandbox can be seen in /proc: hidepid hides them"
        yield Note("threads-hidden", f"{text}; run as root", "warning")


def _sandbox(
    sandbox: Sandbox, window: Window, wanted: Wanted, throttled: float | None
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


def _overhead(sandbox: Sandbox, window: Window, wanted: Wanted) -> Iterable[TopRole]:
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
