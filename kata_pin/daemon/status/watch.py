"""The watch document: what the daemon saw of exclusive pCPUs lately."""

from __future__ import annotations

import time

from kata_pin.daemon.isolation.claims import Claims
from kata_pin.daemon.isolation.watch import Sight, Watch
from kata_pin.model.reports.watch import WatchDocument, WatchedPcpu


def watch_report(watch: Watch, claims: Claims, max_foreign: float) -> WatchDocument:
    """Return the document as of now; `max_foreign` is the setting."""
    now = time.monotonic()
    sights = sorted(watch.sights.values(), key=lambda one: (one.watched.cpu, one.watched.sandbox))
    return WatchDocument(
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        max_foreign_percent=max_foreign,
        problem=watch.problem,
        pcpus=tuple(_pcpu(one, claims.pod(one.watched.sandbox), now) for one in sights),
    )


def _pcpu(sight: Sight, pod: str, now: float) -> WatchedPcpu:
    grown, window = sight.growth, sight.window
    return WatchedPcpu(
        cpu=sight.watched.cpu,
        sandbox=sight.watched.sandbox,
        pod=pod,
        age_s=round(now - sight.look.at_ns / 1e9, 3),
        over_s=None if grown is None else round(grown.length_ns / 1e9, 3),
        waited_percent=None if grown is None else grown.waited_percent,
        others_percent=None if grown is None else grown.percent,
        others_slices=None if grown is None else grown.slices,
        episode_s=None if sight.episode_at is None else round(now - sight.episode_at, 3),
        window_age_s=None if window is None else round(now - sight.window_at, 3),
        window=window,
    )
