"""Which source's value of a container's cpuset is used when they disagree, and why.

The order, first to last:

1. live sources, which report a container's current cpuset: NRI and Kata's persist.json. If both
   report one, the one whose value changed last: an update reaches both, unless one missed it.
2. the kubelet's checkpoint, where it gives the container CPUs of its own: they stay while it lives.
3. the configured cpuset of the sandbox's cgroup: Kata keeps the union of the containers' cpusets
   there. It says nothing about a single container, but is exactly the sandbox mask.
4. config.json of the bundle, which updates do not change.

Steps 2 and 3 are for containers that no live source reports (runtime-rs without NRI). A value is as
old as its last change: repeating it does not make it newer.
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
"""Sources that report each container's current cpuset."""

_RANKS: Final = {CpusetSource.KUBELET: 2, CpusetSource.CGROUP: 1, CpusetSource.BUNDLE: 0}
_WORDS: Final = {
    CpusetSource.NRI: "NRI",
    CpusetSource.KATA: "persist.json",
    CpusetSource.KUBELET: "the kubelet's checkpoint",
    CpusetSource.CGROUP: "the sandbox's cgroup",
    CpusetSource.BUNDLE: "config.json",
}


def believed(reported: Iterable[ReportedCpuset]) -> ReportedCpuset | None:
    """Return the value to use of those that sources reported, None without any."""
    values = tuple(reported)
    live = [one for one in values if one.source in LIVE]
    if live:
        return max(live, key=lambda one: (one.recorded_ns, one.source is CpusetSource.KATA))
    return max(values, key=lambda one: _RANKS[one.source], default=None)


def why(reported: Iterable[ReportedCpuset]) -> str:
    """Return in a few words why that value is used."""
    values = tuple(reported)
    winner = believed(values)
    if winner is None:
        return "no source reports it"
    word = _WORDS[winner.source]
    others = [one for one in values if one is not winner]
    if not others:
        return f"only {word} reports it"
    if all(one.cpus == winner.cpus for one in others):
        return "all sources agree"
    if winner.source not in LIVE:
        return f"{word} takes precedence over config.json, which updates do not change"
    if any(one.source in LIVE and one.cpus != winner.cpus for one in others):
        return f"{word} changed most recently"
    return f"{word} reports the current value"


def settled(
    containers: Sequence[Container], *, kubelet: KubeletState | None, configured: CpuSet
) -> tuple[Container, ...]:
    """Return the containers with the cpusets to use.

    What live sources reported is in the record already. `configured` is the cpuset of the sandbox's
    cgroup, empty where none is configured.
    """
    every = tuple(_by_kubelet(one, kubelet) for one in containers)
    if not configured:
        return every
    shares = _shares(every, configured)
    return tuple(_with(one, CpusetSource.CGROUP, shares.get(one.id)) for one in every)


def is_stale(container: Container) -> bool:
    """Whether only config.json reported a container's cpuset."""
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
    """Return the container with one more value; None: this source reports none."""
    if cpus is None:
        return container
    return replace(
        container, cpus=cpus, reported=(*container.reported, ReportedCpuset(source, cpus, 0))
    )


def _shares(every: Sequence[Container], configured: CpuSet) -> dict[str, CpuSet]:
    """Return what the union means for the containers that only config.json reports.

    Each keeps what is still in the union. New CPUs go to those that lost some, because they were
    moved; else to those that do not look exclusive, whose cpusets are the ones that change.
    """
    rest = [one for one in every if is_stale(one) and one.cpus]
    listed = [one for one in every if one.state is not ContainerState.DELETED]
    known = union(one.cpus or EMPTY for one in listed)
    if not known:
        rest = [one for one in every if is_stale(one)]
    if known == configured:
        return {}
    kept = {one.id: (one.cpus or EMPTY) & configured for one in rest}
    others = union(one.cpus or EMPTY for one in listed if one.id not in kept)
    came = configured - others - union(kept.values())
    moved = [one for one in rest if kept[one.id] != (one.cpus or EMPTY)]
    heirs = moved or [one for one in rest if not looks_exclusive(one)] or rest
    for one in heirs:
        kept[one.id] |= came
    return {key: cpus or configured for key, cpus in kept.items()}
