"""Our own allocator at work: which container gets which CPUs on this node (D8, D9, D14, D15).

Off by default. It is suspended, with a reason, while the kubelet's static policy or another NRI
plugin decides; nothing is written then, and grants have no effect. Each decision is stored before
anything follows from it, so a daemon that is killed finds the same state. Lost state, another host
and offline CPUs are reconciled with what runs; none of them keeps the daemon from starting.

Lifetime: the daemon's; used in the event loop's thread only, between two awaits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from kata_pin.base.allocation import (
    AllocState,
    ContainerRequest,
    Decision,
    Holder,
    RunningContainer,
)
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import HostTopology, union
from kata_pin.base.errors import KataPinError
from kata_pin.base.placement import Node, Note
from kata_pin.base.sandbox import Container
from kata_pin.base.values import CpuClass, Guarantee, NoteLevel
from kata_pin.options.allocation.adjustments import HostDevices
from kata_pin.options.allocation.checked_policy import CheckedPolicy, make_policy
from kata_pin.options.allocation.demand import strict, with_classes
from kata_pin.options.allocation.grants import (
    LEFT_BEHIND,
    AllocNews,
    Grants,
    PendingPasses,
)
from kata_pin.options.allocation.holders import Holders, MemoryHomes, PluginConflicts
from kata_pin.options.allocation.ledger import Ledger
from kata_pin.options.allocation.placement_files import PlacementFiles
from kata_pin.options.allocation.policy import (
    Policy,
    donated,
    ended,
    inherited,
    keeps,
    other_owner,
    resumed,
)
from kata_pin.options.allocation.requests import PodChoices, Specs, as_requested
from kata_pin.placement.masks import sandbox_of
from kata_pin.service.options import Core

log = logging.getLogger(__name__)

Make = Callable[[Alloc, HostTopology], Policy]
"""Makes the policy of these settings for a host; raises ConfigError."""


class Allocator:
    """Holds the state and takes decisions; raises StateError if one cannot be stored."""

    def __init__(self, core: Core, passes: PendingPasses | None, make: Make = make_policy) -> None:
        """`passes` gives a pass to sandboxes that move; None: nothing is decided (offline)."""
        self.settings = core.live.now.alloc
        self.problem = ""
        self.news = AllocNews(core.events)
        self.conflicts = PluginConflicts(core.events.report, time.monotonic)
        self.grants = Grants(core.registry, self.news, passes)
        self.ledger = Ledger(time.monotonic, lambda: core.node.current().topology.online)
        self.placements = PlacementFiles(core.live.now.runtime_dir, self.settings)
        self.devices = HostDevices(core.root, core.kata_pinning.hot_plug)
        self._node = core.node
        self._make = make
        self._holders = Holders(core.registry)
        self.at_work = passes is not None
        """Whether a daemon decides; a command without one only looks at the grants."""
        self._memory = MemoryHomes(core.root, core.node, core.sandboxes.known_vmm)
        self._policy: CheckedPolicy | None = None
        self._topology: HostTopology | None = None
        self._decided = False
        self._stopped = ""
        self._choices = PodChoices()

    # ---- looking -------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Whether the configuration wants an allocator."""
        return self.settings.on

    @property
    def guarantee(self) -> Guarantee:
        """Against which containers `exclusive` holds."""
        return Guarantee.NODE if self.ledger.is_connected else Guarantee.SANDBOXES

    @property
    def state(self) -> AllocState:
        """The grants, also while they have no effect."""
        return self.grants.state

    @property
    def now(self) -> AllocState:
        """The state to act on: without CPUs that a sandbox still has to leave."""
        return self.grants.now

    @property
    def suspended(self) -> str:
        """Why nothing is decided now, empty while kata-pin decides."""
        idle = self._idle()
        if idle:
            return idle
        owner = other_owner(None, self.conflicts.present)
        return owner.message if owner is not None else self.problem

    def _idle(self) -> str:
        """Return why kata-pin decides about no container at all; empty if it does."""
        if not self.on:
            return "the setting alloc.policy is none"
        if self._stopped:
            return self._stopped
        if not self._node.config.acts:
            return "the setting mode is observe"
        owner = other_owner(self._node.current().kubelet)
        return "" if owner is None else owner.message

    @property
    def decides(self) -> bool:
        """Whether grants have effect."""
        return not self.suspended

    @property
    def effective(self) -> AllocState:
        """The state by which containers get cpusets: empty while grants have no effect."""
        return self.now if self.decides else AllocState()

    @property
    def switched_off(self) -> bool:
        """Whether the allocator is switched off: by a setting, or by an uninstall."""
        return not self.on or bool(self._stopped) or not self._node.config.acts

    @property
    def node(self) -> Node:
        """The node as it is now."""
        return self._node.current()

    @property
    def holders(self) -> tuple[Holder, ...]:
        """The containers with exclusive CPUs that others gave them."""
        return self._holders.current(self._node.current(), self.state, self.ledger)

    @property
    def notes(self) -> tuple[Note, ...]:
        """What the operator should know."""
        if not self.on:
            others = (one for one in self.grants.containers() if not one.request.pod.kata)
            return (LEFT_BEHIND,) if any(others) else ()  # only NRI reports those
        why = self.suspended
        own = Note("alloc-suspended", f"kata-pin allocates no CPUs: {why}", NoteLevel.WARNING)
        return (own, *self.news.notes) if why else self.news.notes

    # ---- what changes without an event ---------------------------------------------------

    def follow_host(self, seen: Sequence[Container] = ()) -> None:
        """Follow what changes without an event: the host, CPUs of others (`seen`), who decides."""
        if not self.on:
            return
        topology = self._node.current().topology
        changed = topology is not self._topology
        if changed:
            self._make_policy(topology)
        self.news.suspended(self.suspended)
        taken = self.follow_holders(seen) if self.decides else False
        if self.decides and (changed or taken or not self._decided):
            self._decided = False  # until what follows is stored
            granted = [
                RunningContainer(grant.request, grant.cpus) for grant in self.grants.containers()
            ]
            known = {one.request.container_id: one for one in (*granted, *self.reported())}
            self.reconcile([*known.values()])
        self._decided = self.decides

    def follow_holders(self, seen: Sequence[Container] = ()) -> bool:
        """Take the CPUs that others gave exclusively out of the pools; return whether they changed.

        `seen` are one sandbox's containers as its pass believes them. CPUs that are a grant's own
        stay in it: that is a conflict, which is reported.
        """
        node = self._node.current()
        if seen:
            self._holders.believed(seen, node)
        found = self._holders.current(node, self.state, self.ledger)
        self.news.conflicts(found, self.state.grants.values())
        return self.grants.set_taken(union(one.cpus for one in found) & node.topology.online)

    def reported(self) -> Iterator[RunningContainer]:
        """Yield what a runtime has reported, but for containers left to another plugin."""
        for request, sandbox_id, cpuset in self.ledger.requests():
            yield RunningContainer(self.newest(request, sandbox_id), cpuset.cpus or None)

    def _make_policy(self, topology: HostTopology) -> None:
        self._topology = topology
        try:
            made = self._make(self.settings, topology)
            self._policy = CheckedPolicy(
                self.settings.policy, made, topology, self.settings, self.devices.wrong
            )
            self.problem = ""
        except KataPinError as error:
            self._policy, self.problem = None, str(error)
            log.error("allocator: %s", error)

    def set_orders(self, orders: Mapping[str, CpuClass]) -> None:
        """Take the administrator's overrides; running containers are changed at once."""
        self._choices.orders = orders
        self._apply_choices("override")

    def set_specs(self, specs: Specs) -> None:
        """Take what is listed of pods now, by uid; pods not named keep what they had."""
        self._choices.specs = specs
        self._apply_choices("pod list", ordered=False)

    def newest(self, request: ContainerRequest, sandbox_id: str) -> ContainerRequest:
        """Return a request with its pod's override and annotations of now."""
        known = self.state.get(request.container_id)
        return self._choices.newest(
            as_requested(request, known), sandbox_id, None if known is None else known.request.pod
        )

    def _apply_choices(self, why: str, *, ordered: bool = True) -> None:
        """Change every container whose pod's choices have changed; overrides only if `ordered`.

        No sandbox is known of another runtime's container while NRI is not connected.
        """
        for grant in list(self.grants.containers()):
            entry = self.ledger.get(grant.container_id)
            known = sandbox_of(grant.request.pod) or grant.request.ended_in
            sandbox_id = known or (entry.sandbox_id if entry else "")
            request = self.newest(grant.request, sandbox_id)
            if not ordered:
                order = grant.request.pod.ordered
                request = replace(request, pod=replace(request.pod, ordered=order))
            if request != grant.request:
                self.change(request, why)

    # ---- deciding ------------------------------------------------------------------------

    def admit(self, request: ContainerRequest, *, foreign: bool = False) -> Decision:
        """Give a new container its CPUs. `foreign`: another plugin has set its cpuset already."""
        if self._policy is None or self._idle():
            return Decision(self.state)
        self.conflicts.arrived(request, with_cpuset=foreign)
        owner = self.conflicts.owner(request, foreign=foreign)
        if owner is None:
            return self._create(self._policy, request)
        decision = self._policy.decline(self.state, request, owner)
        fails = decision.refused is not None and decision.refused.strict
        if fails and not foreign and not self.conflicts.present:
            # the other plugin is only suspected, and without CPUs the container fails anyway
            return self._create(self._policy, request)
        return self._take(decision, "allocated", request)

    def _create(self, policy: CheckedPolicy, request: ContainerRequest) -> Decision:
        """Give a new container its CPUs and classes, and let it read its placement."""
        decision = self._allocated(policy, request)
        decision = with_classes(decision, request.container_id, self.settings)
        topology = self._node.current().topology
        decision = self.placements.announced(decision, request.container_id, topology)
        return self._take(decision, "allocated", request)

    def _allocated(self, policy: CheckedPolicy, request: ContainerRequest) -> Decision:
        """Return the decision about a new container; the next instance of one has its grant."""
        state = inherited(self.state, request)
        if state is self.state:
            return self._first(policy, request)
        decision = policy.change(state, request)
        if decision.refused is None or not strict(request, self.settings):
            return decision
        return Decision(self.state, refused=replace(decision.refused, strict=True))

    def _first(self, policy: CheckedPolicy, request: ContainerRequest) -> Decision:
        """Return the decision about a container's first instance.

        It gets the CPUs of its pod's init containers, which have ended then. Where it is unknown
        what a container was, each one that has ended counts as one if that helps this one.
        """
        state = donated(self.state, request, lambda one: self._choices.is_init(one) is True)
        decision = policy.allocate(state, request)
        grant = decision.state.get(request.container_id)
        if decision.refused is None and not (grant is not None and grant.own):
            return decision
        more = donated(state, request, lambda one: self._choices.is_init(one) is None)
        return decision if more is state else policy.allocate(more, request)

    def change(self, request: ContainerRequest, why: str) -> Decision:
        """Give a running container what it requests now."""
        if self._policy is None or not self.decides:
            return Decision(self.state)
        state = inherited(self.state, request)
        decision = self._policy.change(self._memory.seen(state, request), request)
        return self._take(decision, why, request)

    def stop(self, why: str) -> None:
        """Decide nothing more while the daemon runs, for this reason."""
        self._stopped = why

    def release(self, container_ids: Iterable[str], why: str) -> None:
        """Release the grants of containers that have ended for good.

        While the allocator is switched off no other grant changes: they say what to restore.
        """
        for container_id in container_ids:
            self.news.ended(container_id)
            if self.switched_off:
                self.grants.keep(self.state.without(container_id))
            elif self._policy is not None and self.state.get(container_id) is not None:
                self._take(self._policy.release(self.state, container_id), why)

    def ended(self, container_ids: Iterable[str], sandbox_id: str, why: str) -> None:
        """Release the grants of containers that have ended, but for CPUs of their own.

        Those are kept for the container's next instance, until the sandbox has ended.
        """
        for container_id in container_ids:
            grant = self.state.get(container_id)
            if grant is None or grant.request.ended_in:
                continue
            if self.decides and keeps(grant):
                self.news.ended(container_id)
                self.grants.keep(ended(self.state, container_id, sandbox_id))
            else:
                self.release([container_id], why)

    def release_sandbox(self, sandbox_id: str) -> None:
        """Release the grants of a sandbox that has ended."""
        gone = (
            one.container_id
            for one in self.grants.containers()
            if sandbox_id in (sandbox_of(one.request.pod), one.request.ended_in)
        )
        self.release([*gone], "the sandbox has ended")

    def reconcile(self, running: Sequence[RunningContainer]) -> None:
        """Bring the state in line with what runs: everything there is."""
        if self._policy is not None and self.decides:
            self._take(self._policy.reconcile(resumed(self.state, running), running), "reconciled")

    def _take(
        self, decision: Decision, why: str, request: ContainerRequest | None = None
    ) -> Decision:
        self.grants.commit(decision, why, request)
        return decision
