"""The guests of all sandboxes: which containers are confined to which guest CPUs (D12).

The outcome of a pass goes to the keeper of the sandbox's guest, which talks to the guest in its own
time. A keeper is made when there is something to send, and ends with its sandbox.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import (
    KataPinError,
    StateError,
    reason_of,
)
from kata_pin.base.placement import Cause, Node, PassOutcome, Placement, Report
from kata_pin.base.sandbox import Container, GuestFacts, Sandbox, Vmm
from kata_pin.base.values import GuestState
from kata_pin.engine.counters import Observer
from kata_pin.engine.node import NodeWatch
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.guest.cpus import GuestGoal, GuestPlan, GuestView, guest_lines, plan_guest
from kata_pin.guest.keeper import BAD, Agents, Keeper
from kata_pin.guest.map import NOTHING_KNOWN
from kata_pin.records.containers import Registry
from kata_pin.records.pins import GuestCpusets, Pins

log = logging.getLogger(__name__)

_QUIET: Final = frozenset(
    {"audit", "thread born", "thread exited", "process born", "process events"}
    | {"still without a VMM", "processes were read"}
)
"""Reasons of passes that mean Kata changed no container."""

_INSISTING: Final = frozenset({"pin", "unpin", "release", "reconcile", "configuration reloaded"})
"""Reasons of passes that an operator asked for."""

Claims = tuple[tuple[object, ...], ...]
"""What decides about pairs: the claims of a sandbox's containers."""


class _Planned(NamedTuple):
    """A plan, and what it was made from: a placement is of certain threads and roles."""

    placement: Placement | None
    inputs: object
    plan: GuestPlan | None


@dataclass
class Guests(Observer):
    """Hands what each pass means for a guest to that sandbox's keeper.

    Everything runs in the event loop's thread.

    `start` runs a task until the daemon ends. Raises StateError from the registry.
    """

    _agents: Agents
    _registry: Registry
    _pins: Pins
    _node: NodeWatch
    _sandboxes: Sandboxes
    _start: Callable[[Coroutine[object, object, None]], object]
    _keepers: dict[str, Keeper] = field(default_factory=dict)
    _claims: dict[str, Claims] = field(default_factory=dict)
    _causes: dict[str, Cause] = field(default_factory=dict)
    _plans: dict[str, _Planned] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._book = GuestCpusets(self._registry)

    def passed(self, outcome: PassOutcome) -> None:
        """See Observer: hand the plan to the keeper, if the host pins are set."""
        vmm = self._sandboxes.known_vmm(outcome.sandbox_id)
        done = outcome.report.all_placed or outcome.mask is None  # undo needs no pin
        if vmm is None or not done:
            return
        try:
            self._hand_over(outcome, vmm)
        except (KataPinError, OSError, ValueError) as error:  # an observer never fails
            log.error(
                "sandbox %s: guest cpusets not updated: %s", outcome.sandbox_id, reason_of(error)
            )

    def ended(self, outcome: PassOutcome) -> None:
        """See Observer: forget the guest."""
        self._claims.pop(outcome.sandbox_id, None)
        self._causes.pop(outcome.sandbox_id, None)
        self._plans.pop(outcome.sandbox_id, None)
        keeper = self._keepers.pop(outcome.sandbox_id, None)
        if keeper is not None:
            keeper.stop()
            try:
                self._book.forget_all(outcome.sandbox_id)
            except StateError as error:
                log.error("sandbox %s: cannot forget its guest: %s", outcome.sandbox_id, error)

    def _hand_over(self, outcome: PassOutcome, vmm: Vmm) -> None:
        sandbox_id, report = outcome.sandbox_id, outcome.report
        sandbox = Sandbox(sandbox_id, self._registry.containers(sandbox_id), vmm)
        keeper = self._keepers.get(sandbox_id) or self._new_keeper(sandbox, report)
        if keeper is None:
            return
        repeated = outcome.cause == self._causes.get(sandbox_id)  # for the same events
        reasons = frozenset() if repeated else frozenset(outcome.cause.reasons)
        self._causes[sandbox_id] = outcome.cause
        self._claims[sandbox_id] = _claims(sandbox.containers)
        keeper.update(
            vmm,
            partial(self._plan, sandbox, report),
            self._goal(outcome),
            again=not reasons <= _QUIET,
            insist=bool(reasons & _INSISTING),
        )

    def _new_keeper(self, sandbox: Sandbox, report: Report) -> Keeper | None:
        """Return a keeper if there is something to send, or was before a restart."""
        plan = self._plan(sandbox, report, NOTHING_KNOWN)
        if plan is None:
            return None
        owned = any(one.container_id for one in plan.map.links)
        if not owned and not plan.map.hotplugged and not self._book.sent(sandbox.id):
            return None
        keeper = Keeper(sandbox.id, self._agents, self._book)
        self._keepers[sandbox.id] = keeper
        self._start(keeper.run())
        return keeper

    def _plan(self, sandbox: Sandbox, report: Report, facts: GuestFacts) -> GuestPlan | None:
        """Return what a pass means for the guest; the last plan where nothing it needs changed."""
        node, inferred = self._node.last, self._agents.settings().act_on_inferred
        desired = report.placement.desired if report.placement is not None else {}
        free = [one.task.affinity for one in report.threads if one.key not in desired]
        inputs = (sandbox.decisive, facts, node, inferred, free)
        last = self._plans.get(sandbox.id)
        if last is not None and last.placement is report.placement and last.inputs == inputs:
            return last.plan
        plan = plan_guest(sandbox, report, node, facts, inferred=inferred)
        self._plans[sandbox.id] = _Planned(report.placement, inputs, plan)
        return plan

    def _goal(self, outcome: PassOutcome) -> GuestGoal:
        released = outcome.sandbox_id in self._pins.released()
        if released or outcome.mask is None or not self._agents.settings().enabled:
            return GuestGoal.GIVE_BACK
        return GuestGoal.KEEP if self._agents.live.acts else GuestGoal.LEAVE

    async def before(self, sandbox_id: str, foresee: Callable[[], Awaitable[Report]]) -> None:
        """Widen guest cpusets where the pass that is due will move pairs; WIDEN_S at most.

        `foresee` returns what the pass would decide, and sets nothing. Costs nothing if no
        container changed, or the guest is not confined or not prompt.
        """
        keeper, vmm = self._keepers.get(sandbox_id), self._sandboxes.known_vmm(sandbox_id)
        if keeper is None or vmm is None or not keeper.may_widen:
            return
        containers = self._registry.containers(sandbox_id)
        if _claims(containers) == self._claims.get(sandbox_id):
            return
        sandbox = Sandbox(sandbox_id, containers, vmm)
        try:
            await keeper.widen(partial(self._plan, sandbox, await foresee()))
        except (KataPinError, OSError, ValueError) as error:  # the pass matters more
            log.error("sandbox %s: guest cpusets not widened: %s", sandbox_id, reason_of(error))

    def audit(self) -> None:
        """Send everything to every guest again, and check whether it holds."""
        for keeper in self._keepers.values():
            keeper.audit()

    async def wait_idle(self, sandbox_ids: Iterable[str], within_s: float) -> None:
        """Wait until these guests have what is due, or failed; `within_s` at most."""
        waiting = [self._keepers[one].wait_idle() for one in sandbox_ids if one in self._keepers]
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*waiting)
        except TimeoutError:
            log.info("guest cpusets are still being restored")

    def facts(self, sandbox_id: str) -> GuestFacts:
        """Return what is known of a guest."""
        keeper = self._keepers.get(sandbox_id)
        return NOTHING_KNOWN if keeper is None else keeper.facts

    def plan(self, sandbox: Sandbox, report: Report) -> GuestPlan | None:
        """Return what a pass means for a guest by what is known of it; None without a VMM."""
        return self._plan(sandbox, report, self.facts(sandbox.id))

    def view(self, sandbox_id: str, plan: GuestPlan) -> GuestView:
        """Return what documents show of a guest with this plan."""
        keeper = self._keepers.get(sandbox_id)
        if keeper is not None:
            return keeper.view(plan)
        on = self._agents.settings().enabled and self._agents.live.acts
        return GuestView(plan, GuestState.IDLE if on else GuestState.OFF)

    def cpus_of(self, sandbox_id: str, container_id: str) -> CpuSet | None:
        """Return the guest CPUs that a container is confined to; None if that is not known."""
        planned = self._plans.get(sandbox_id)
        if planned is None or planned.plan is None:
            return None
        sent = self.view(sandbox_id, planned.plan).sent.get(container_id)
        return None if sent is None or sent.proof in BAD else sent.cpus

    def lines(self, sandbox: Sandbox, report: Report) -> list[str]:
        """Return the lines of `explain` about a guest."""
        plan = self.plan(sandbox, report)
        return [] if plan is None else list(guest_lines(sandbox, plan.map, plan.cpusets))


def _claims(containers: Iterable[Container]) -> Claims:
    return tuple(
        (one.id, one.cpus, one.quota_us, one.period_us, one.shares, one.state.counts)
        for one in containers
    )


async def restore_guests(
    agents: Agents, registry: Registry, node: Node, passes: Iterable[tuple[Sandbox, Report]]
) -> None:
    """Widen every container that kata-pin confined in its guest, once: undo without a daemon.

    Raises StateError when the registry's file cannot be used.
    """
    book = GuestCpusets(registry)
    keepers = []
    for sandbox, report in passes:
        if sandbox.vmm is not None and book.sent(sandbox.id):
            keeper = Keeper(sandbox.id, agents, book)
            keeper.update(
                sandbox.vmm, partial(plan_guest, sandbox, report, node), GuestGoal.GIVE_BACK
            )
            keepers.append(keeper)
    await asyncio.gather(*(keeper.attempt() for keeper in keepers))
