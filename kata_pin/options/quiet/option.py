"""Quiet pCPUs: interrupts and kernel work that are kept off exclusive ones (`quiet`)."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Final

from kata_pin.base.placement import Note, PassOutcome
from kata_pin.engine.counters import MetricRow, Shown, readings
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.linux.process import vfio_devices
from kata_pin.options.quiet.claims import (
    PodFacts,
    QuietStatus,
    kept_quiet,
    node_notes,
    quiet_notes,
    quiet_sandbox,
)
from kata_pin.options.quiet.keeper import QuietKeeper
from kata_pin.options.quiet.kernel_work import KernelWork
from kata_pin.options.quiet.tuner import Tunables
from kata_pin.options.quiet.values import TunableKind
from kata_pin.service.options import Core, Running


class Quiet(Running):
    """The option at work: the keeper, and what documents have of its last round."""

    def __init__(self, keeper: QuietKeeper, sandboxes: Sandboxes) -> None:
        self._keeper = keeper
        self._sandboxes = sandboxes

    def passed(self, outcome: PassOutcome) -> None:
        """See what a sandbox has now."""
        self._keeper.passed(outcome)

    def ended(self, outcome: PassOutcome) -> None:
        """Give back what a sandbox had."""
        self._keeper.ended(outcome)

    def tasks(self) -> Iterator[Coroutine[object, object, None]]:
        """Yield the keeper's rounds, and what wakes it."""
        yield self._keeper.run(self._passes_done)
        yield self._keeper.follow_irqbalance()

    def _passes_done(self) -> bool:
        """Whether every sandbox has had a pass since the start."""
        caches = map(self._sandboxes.cache, self._sandboxes.ids)
        return all(cache is None or cache.report is not None for cache in caches)

    def notes(self, sandbox_id: str) -> Iterator[Note]:
        """Yield why pCPUs of a sandbox are not quiet."""
        return quiet_notes(self._keeper.status, sandbox_id)

    def node_notes(self) -> Iterator[Note]:
        """Yield what could not be written."""
        return node_notes(self._keeper.status)

    def facts(self, sandbox_id: str) -> Mapping[str, Any]:
        """Return which pCPUs of a sandbox are quiet."""
        exclusive = self._keeper.exclusive(sandbox_id)
        return {"quiet": quiet_sandbox(self._keeper.status, sandbox_id, exclusive)}

    def state(self) -> Mapping[str, Any]:
        """Return what is kept quiet on the node."""
        return {"kept_quiet": kept_quiet(self._keeper.status)}

    def metrics(self) -> Iterable[Shown]:
        """Return what the last round found; nothing while `quiet` is `off` or `report`."""
        status = self._keeper.status
        return readings(METRICS, status) if status.acts else ()

    async def give_back(self, ids: Collection[str] | None) -> Mapping[str, Any]:
        """Restore all values if no sandboxes are named: they are the node's."""
        if ids is not None:
            return {}
        with closing(self._keeper):
            return {"quiet_kept": tuple(await self._keeper.give_back())}


def start(core: Core) -> Quiet:
    """Return the option at work; raises StateError."""
    facts = PodFacts(
        core.registry.containers, core.kata_pinning.annotations, partial(vfio_devices, core.root)
    )
    keeper = QuietKeeper(
        core.root,
        core.node,
        core.live,
        store=Tunables(core.registry),
        events=core.events,
        facts=facts,
        sources=[KernelWork(core.root, core.live)],
    )
    return Quiet(keeper, core.sandboxes)


METRICS: Final[tuple[MetricRow[QuietStatus], ...]] = (
    MetricRow(
        "kata_pin_quiet_cpus",
        "Exclusive pCPUs that are kept quiet, by level; spared: those that cannot be.",
        lambda status: {
            "irq": len(status.state.quiet - status.state.full),
            "full": len(status.state.full),
            "spared": len(status.state.spared),
        },
        {"level": ("irq", "full", "spared")},
        "`irq`: of interrupts only, `full`: of the kernel's own work too ([quiet.md](quiet.md)).",
    ),
    MetricRow(
        "kata_pin_quiet_values",
        "Masks and other values that are changed to keep pCPUs quiet, by kind.",
        lambda status: {kind: status.held[kind] for kind in TunableKind},
        {"kind": TunableKind},
    ),
    MetricRow(
        "kata_pin_quiet_write_failures_total",
        "Failed writes of such values, by kind.",
        lambda status: {kind: status.failed[kind] for kind in TunableKind},
        {"kind": TunableKind},
        "`doctor` says why.",
    ),
    MetricRow(
        "kata_pin_quiet_managed_interrupts",
        "Managed interrupts that may fire on quiet pCPUs: the kernel places them.",
        lambda status: status.managed_on(status.state.quiet),
    ),
    MetricRow(
        "kata_pin_quiet_interrupts_total",
        "Interrupts of devices that fired on quiet pCPUs, by whether they can be moved.",
        lambda status: {"movable": status.movable_fired, "managed": status.managed_fired},
        {"kind": ("movable", "managed")},
        "One that is movable may still fire on its former pCPU after a move.",
    ),
)
