"""`bind`: CPUs that an administrator names for a sandbox, and their end in time.

A binding is a row of the registry that passes go by (placement/pairing.py); a pass that
cannot apply it whole removes it and sets everything back, so it is never applied in part.
Lifetime: the daemon's; used in the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.answers import BindDocument, BoundSandbox, BoundThread, NodeEventKind
from kata_pin.base.errors import DaemonError, StateError
from kata_pin.base.json_text import Fields
from kata_pin.base.placement import MOST_BOUND_S, Binding, PassOutcome, Report
from kata_pin.base.sandbox import Sandbox
from kata_pin.engine.counters import Observer
from kata_pin.engine.runner import PassRunner
from kata_pin.placement.notes import UNBOUND
from kata_pin.service import protocol
from kata_pin.service.options import Core

RETRY_S: Final = 1.0
"""Between tries to end a binding that cannot be removed from the registry."""

log = logging.getLogger(__name__)


@dataclass
class Bindings(Observer):
    """Makes and ends the bindings of the registry; observes passes."""

    _core: Core
    _passes: PassRunner

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()
        self._failed: dict[str, str] = {}

    async def bind(self, fields: Fields) -> bytes:
        """Serve the verb: bind one sandbox, try that, or clear one or all; raises DaemonError."""
        sandbox_id, dry_run = fields.text("sandbox"), fields.flag("dry_run")
        if sandbox_id and sandbox_id not in self._core.sandboxes.ids:
            raise DaemonError(f"no sandbox {sandbox_id!r}", hint="kata-pin show lists them")
        if fields.flag("clear"):
            done = await self._clear(
                [sandbox_id] if sandbox_id else list(self._core.pins.bindings())
            )
        else:
            fields.need("sandbox", "vcpus", "cpus")
            vcpus, cpus, overhead = (
                CpuSet.parse(fields.text(name)) for name in ("vcpus", "cpus", "overhead")
            )
            for_s = fields.number("for_s", 1, MOST_BOUND_S)
            binding = Binding(vcpus, cpus, overhead, *_until(for_s))
            report = await self._try(sandbox_id, binding)
            if not dry_run:
                report = await self._apply(sandbox_id, binding)
            done = {sandbox_id: report}
        sandboxes = tuple(self._report(one, report) for one, report in done.items())
        return protocol.encode(BindDocument(dry_run=dry_run, sandboxes=sandboxes))

    def passed(self, outcome: PassOutcome) -> None:
        """See Observer: report a binding that a pass ended."""
        for note in outcome.report.notes:
            if note.code == UNBOUND:
                self._failed[outcome.sandbox_id] = note.text
                self._core.events.report(
                    NodeEventKind.UNBOUND,
                    *("sandbox %s: %s", outcome.sandbox_id, note.text),
                    SANDBOX=outcome.sandbox_id,
                )

    def ended(self, outcome: PassOutcome) -> None:
        """See Observer."""
        self._failed.pop(outcome.sandbox_id, None)

    async def run(self) -> None:
        """End each binding when its time has come, until cancelled."""
        while True:
            self._changed.clear()
            now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            ends = {
                one: binding.until_ns
                for one, binding in self._core.pins.bindings().items()
                if binding.until_ns is not None
            }
            try:
                self._forget((one for one, end in ends.items() if end <= now), "its time has ended")
            except StateError as error:  # a full disk: the registry goes on in memory
                log.warning("cannot end a binding now: %s; retrying", error)
                await asyncio.sleep(RETRY_S)
                continue
            left = [(end - now) / 1e9 for end in ends.values() if end > now]
            try:
                async with asyncio.timeout(min(left, default=None)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _try(self, sandbox_id: str, binding: Binding) -> Report:
        """Return what a pass would decide; raises DaemonError if it could not apply all of it."""
        if not self._core.live.acts:
            raise DaemonError("not bound: the daemon only observes", hint="setting mode: act")
        if sandbox_id in self._core.pins.released():
            hint = f"kata-pin pin {sandbox_id} first"
            raise DaemonError("not bound: the sandbox was released by unpin", hint=hint)
        if not binding.vcpus or not binding.cpus:
            raise DaemonError("not bound: no vCPU or no pCPU is named")
        report = await self._passes.foreseen(sandbox_id, binding)
        placement = report.placement
        if placement is None or placement.binding is None:
            why = placement.unbound if placement is not None else "no VMM was found"
            raise DaemonError(f"not bound: {why or 'no container of the sandbox has a cpuset'}")
        return report

    async def _apply(self, sandbox_id: str, binding: Binding) -> Report:
        """Set it and return the pass; raises DaemonError if that undid it."""
        self._failed.pop(sandbox_id, None)
        self._core.pins.bind(sandbox_id, binding)
        self._changed.set()
        ticket = self._core.sandboxes.mark(sandbox_id, "bind")
        report = None
        try:
            report = await self._core.sandboxes.wait_for_pass(sandbox_id, ticket)
        finally:
            if report is None:  # it failed, or took too long
                self._forget([sandbox_id], "the pass over it failed")
        if report is None or self._core.pins.binding(sandbox_id) != binding:
            why = self._failed.pop(sandbox_id, "the pass over it failed; see the log")
            raise DaemonError(f"not bound; policy places every thread again: {why}")
        self._core.events.report(
            NodeEventKind.BOUND,
            *("sandbox %s: bound by hand: %s", sandbox_id, binding),
            level=logging.INFO,
            SANDBOX=sandbox_id,
        )
        return report

    async def _clear(self, sandbox_ids: Sequence[str]) -> Mapping[str, Report]:
        bound = self._core.pins.bindings()
        self._forget([one for one in sandbox_ids if one in bound], "cleared")
        tickets = [(one, self._core.sandboxes.mark(one, "bind --clear")) for one in sandbox_ids]
        found = {
            one: await self._core.sandboxes.wait_for_pass(one, ticket) for one, ticket in tickets
        }
        return {one: report for one, report in found.items() if report is not None}

    def _forget(self, sandbox_ids: Iterable[str], why: str) -> None:
        """Remove bindings and ask for the passes that set everything back."""
        for sandbox_id in sandbox_ids:
            self._core.pins.bind(sandbox_id, None)
            self._core.events.report(
                NodeEventKind.UNBOUND,
                *("sandbox %s: no longer bound by hand: %s", sandbox_id, why),
                level=logging.INFO,
                counts=False,
                SANDBOX=sandbox_id,
            )
            if sandbox_id in self._core.sandboxes.ids:
                self._core.sandboxes.mark(sandbox_id, "binding ended")

    def _report(self, sandbox_id: str, report: Report) -> BoundSandbox:
        placement = report.placement
        binding = placement.binding if placement is not None else None
        desired = placement.desired if placement is not None else {}
        return BoundSandbox(
            id=sandbox_id,
            pod=Sandbox(sandbox_id, self._core.registry.containers(sandbox_id)).pod,
            vcpus=str(binding.vcpus) if binding else "",
            cpus=str(binding.cpus) if binding else "",
            overhead=str(binding.overhead) if binding else "",
            until=binding.until if binding else "",
            threads=tuple(
                BoundThread(
                    tid=one.key.tid,
                    label=one.label,
                    affinity=str(one.task.affinity),
                    expected=str(desired[one.key].applied),
                    reason=desired[one.key].reason,
                )
                for one in report.threads
                if one.key in desired
            ),
        )


def _until(for_s: int | None) -> tuple[int | None, str]:
    """Return the end on CLOCK_BOOTTIME, and for people."""
    if for_s is None:
        return None, ""
    end = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + for_s * 10**9
    return end, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + for_s))
