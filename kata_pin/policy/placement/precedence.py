"""Which source is believed about a container's cpuset when they disagree, and why.

The order, first to last:

1. live sources, which tell a container's cpuset of now: NRI and Kata's persist.json. Where both
   tell, the one whose value changed last: an update reaches both, what one missed the other tells.
2. the kubelet's checkpoint, where it gives the container CPUs of its own: they stay while it lives.
3. the written cpuset of the sandbox's cgroup: Kata keeps the union of the containers' cpusets
   there. It tells nothing of a single container, but the sandbox mask it tells exactly.
4. config.json of the bundle, which no update changes.

Steps 2 and 3 are for containers that no live source tells of (runtime-rs without NRI). A value is
as old as its last change: a source that repeats itself is not newer for it.

Pure functions. Out of scope: how long values are kept (observations.py), and whether a CPU
is exclusive (exclusive.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.node import KubeletState
from kata_pin.model.sandbox import (
    Container,
    ContainerKind,
    ContainerState,
    CpusetSource,
    ReportedCpuset,
)
from kata_pin.policy.placement.exclusive import looks_exclusive

LIVE: Final = (CpusetSource.NRI, CpusetSource.KATA)
"""Sources that tell each container's cpuset of now."""

_RANKS: Final = {
    CpusetSource.KUBELET: 2,
    CpusetSource.CGROUP: 1,
    CpusetSource.BUNDLE: 0,
}
_WORDS: Final = {
    CpusetSource.NRI: "NRI",
    CpusetSource.KATA: "persist.json",
    CpusetSource.KUBELET: "the kubelet's checkpoint",
    CpusetSource.CGROUP: "the sandbox's cgroup",
    CpusetSource.BUNDLE: "config.json",
}


def believed(reported: Iterable[ReportedCpuset]) -> ReportedCpuset | None:
    """Return what is believed of what sources told, None where none told anything."""
    values = tuple(reported)
    live = [one for one in values if one.source in LIVE]
    if live:
        return max(live, key=lambda one: (one.recorded_ns, one.source is CpusetSource.KATA))
    return max(values, key=lambda one: _RANKS[one.source], default=None)


def why(reported: Iterable[ReportedCpuset]) -> str:
    """Return in a few words why that one is believed."""
    values = tuple(reported)
    winner = believed(values)
    if winner is None:
        return "no source tells it"
    word = _WORDS[winner.source]
    others = [one for one in values if one is not winner]
    if not others:
        return f"{word} alone tells it"
    if all(one.cpus == winner.cpus for one in others):
        return "all sources agree"
    if winner.source not in LIVE:
        return f"{word} stands above config.json, which no update changes"
    if any(one.source in LIVE and one.cpus != winner.cpus for one in others):
        return f"{word} changed last"
    return f"{word} tells what holds now"


def settled(
    containers: Sequence[Container], *, kubelet: KubeletState | None, written: CpuSet
) -> tuple[Container, ...]:
    """Return the containers with the cpusets that are believed.

    What live sources told is in the record already. `written` is the cpuset that somebody wrote for
    the sandbox's cgroup; empty: none did.
    """
    every = tuple(_by_kubelet(one, kubelet) for one in containers)
    if not written:
        return every
    shares = _shares(every, written)
    return tuple(_with(one, CpusetSource.CGROUP, shares.get(one.id)) for one in every)


def is_stale(container: Container) -> bool:
    """Whether only config.json told a container's cpuset."""
    winner = believed(container.reported)
    return (
        container.kind is ContainerKind.CONTAINER
        and container.state.counts
        and winner is not None
        and winner.source is CpusetSource.BUNDLE
    )


def _by_kubelet(container: Container, kubelet: KubeletState | None) -> Container:
    if kubelet is None or not kubelet.static or not is_stale(container):
        return container
    entry = kubelet.entries.get(container.pod_uid, {}).get(container.name)
    return _with(container, CpusetSource.KUBELET, entry or None)


def _with(container: Container, source: CpusetSource, cpus: CpuSet | None) -> Container:
    """Return the container with a value more; None: this source tells none."""
    if cpus is None:
        return container
    return replace(
        container, cpus=cpus, reported=(*container.reported, ReportedCpuset(source, cpus, 0))
    )


def _shares(every: Sequence[Container], written: CpuSet) -> dict[str, CpuSet]:
    """Return what the union means for the containers that only config.json tells of.

    Each keeps what is still in the union. CPUs that came are for those that lost some, as they were
    moved; else for those that do not look exclusive: their cpusets are the ones that move.
    """
    rest = [one for one in every if is_stale(one) and one.cpus]
    listed = [one for one in every if one.state is not ContainerState.DELETED]
    known = union(one.cpus or EMPTY for one in listed)
    if not known:
        rest = [one for one in every if is_stale(one)]
    if known == written:
        return {}
    kept = {one.id: (one.cpus or EMPTY) & written for one in rest}
    others = union(one.cpus or EMPTY for one in listed if one.id not in kept)
    came = written - others - union(kept.values())
    moved = [one for one in rest if kept[one.id] != (one.cpus or EMPTY)]
    heirs = moved or [one for one in rest if not looks_exclusive(one)] or rest
    for one in heirs:
        kept[one.id] |= came
    return {key: cpus or written for key, cpus in kept.items()}
