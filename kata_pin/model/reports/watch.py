"""The watch document: what the daemon saw of exclusive pCPUs lately, without being asked."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION
from kata_pin.model.reports.prove import ProvedPcpu


@dataclass(frozen=True, slots=True)
class WatchedPcpu:
    """One exclusive pCPU with a vCPU of its own."""

    cpu: int  #: the pCPU
    sandbox: str  #: id of the sandbox that owns it
    pod: str  #: pod of that sandbox
    age_s: float  #: age of the last look at its counters
    over_s: float | None  #: time between the last two looks; null: there was only one
    waited_percent: float | None  #: share of that time in which its threads waited for it
    #: greatest possible share of others in that time, kernel threads that belong there included
    others_percent: float | None
    #: how often others came onto it; null: not known (the kernel has no /proc/schedstat)
    others_slices: int | None
    episode_s: float | None  #: age of the episode of foreign tasks that lasts; null: none
    window_age_s: float | None  #: age of the last recording of who ran there; null: none
    window: ProvedPcpu | None  #: what was recorded; null: nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchDocument:
    """What the daemon answers to `watch`."""

    version: int = VERSION  #: version of the document
    kind: str = "watch"  #: kind of the document
    time: str  #: when it was made
    max_foreign_percent: float  #: the setting `isolation.max_foreign`
    #: why nobody who ran can be named; empty: recording works, or no pCPU is watched yet
    problem: str
    pcpus: tuple[WatchedPcpu, ...]  #: one object per watched pCPU
