"""Our own allocator at work: which container gets which CPUs on this node (D8, D9, D14, D15).

Off by default. It is suspended, with a reason, while the kubelet's static policy or another NRI
plugin decides; nothing is written then, and grants have no effect. Each decision is stored before
anything follows from it, so a daemon that is killed finds the same state. Lost state, another host
and offline CPUs are reconciled with what runs; none of them keeps the daemon from starting.

Lifetime: the daemon's; used in the event loop's thread only, between two awaits. Out of scope: the
rules (policy/alloc), cpusets for the runtime (ledger.py), affinities (engine.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from kata_pin.config.alloc import Alloc
from kata_pin.daemon.allocation.checked_policy import CheckedPolicy
from kata_pin.daemon.allocation.ledger import Ledger
from kata_pin.daemon.allocation.notices import AllocNews
from kata_pin.daemon.allocation.pending_passes import PendingPasses
from kata_pin.daemon.allocation.plugin_conflicts import PluginConflicts
from kata_pin.daemon.allocation.requests import Annotations, PodChoices
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.store.grants import AllocStore
from kata_pin.errors import KataPinError
from kata_pin.model.alloc import (
    AllocState,
    ContainerRequest,
    Decision,
    Grant,
    GrantKind,
    Guarantee,
    Running,
)
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.node import Node
from kata_pin.model.placement import Note, NoteLevel
from kata_pin.model.settings import CpuClass
from kata_pin.model.topology import HostTopology
from kata_pin.policy.alloc.allotment import sandbox_of, vm_of
from kata_pin.policy.alloc.failure import other_owner
from kata_pin.policy.alloc.handover import Leaving, after_pass, held_back, in_force, still_to_leave
from kata_pin.policy.alloc.policy import Policy
from kata_pin.policy.alloc.shared_pool import changes

log = logging.getLogger(__name__)

LEFT_BEHIND: Final = Note(
    "alloc-left-behind",
    "containers may still have cpusets that kata-pin set before alloc.policy was none; they get "
    "all CPUs when NRI is connected",
)

Make = Callable[[HostTopology], Policy]
"""Makes the policy for a host; raises ConfigError."""


class Allocator:
    """Holds the state and takes decisions; raises StateError if one cannot be stored."""

    def __init__(
        self,
        settings: Alloc,
        node: NodeWatch,
        store: AllocStore,
        make: Make,
        passes: PendingPasses | None = None,
    ) -> None:
        """`passes` gives a pass to sandboxes that move; without it nothing is decided (offline)."""
        self.problem = ""
        self.news = AllocNews()
        self.conflicts = PluginConflicts()
        self.ledger = Ledger(lambda: node.current().topology.online)
        self._settings = settings
        self._node = node
        self._store = store
        self._make = make
        self._passes = passes
        self._policy: CheckedPolicy | None = None
        self._topology: HostTopology | None = None
        self._decided = False
        self._stopped = ""
        self._state = store.read() or AllocState()
        self._leaving: Leaving = {}
        self._now: tuple[AllocState, Leaving, AllocState] | None = None
        self._choices = PodChoices()
        self._logged_suspended = ""
        self._deferred: list[Callable[[], None]] | None = None

    # ---- looking -------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Whether the configuration wants an allocator."""
        return self._settings.on

    @property
    def at_work(self) -> bool:
        """Whether a daemon decides; a command without one only looks at the grants."""
        return self._passes is not None

    @property
    def guarantee(self) -> Guarantee:
        """Against which containers `exclusive` holds."""
        return Guarantee.NODE if self.ledger.is_connected else Guarantee.SANDBOXES

    @property
    def policy_name(self) -> str:
        """The policy's name."""
        return self._settings.policy

    @property
    def state(self) -> AllocState:
        """The grants, also while they have no effect."""
        return self._state

    @property
    def now(self) -> AllocState:
        """The state to act on: without CPUs that a sandbox still has to leave."""
        known = self._now
        if known is None or known[0] is not self._state or known[1] is not self._leaving:
            known = self._state, self._leaving, in_force(self._state, self._leaving)
            self._now = known
        return known[2]

    @property
    def held_back(self) -> CpuSet:
        """The CPUs held back until a pass over the sandbox that leaves them has ended."""
        return union(held_back(self._state, self._leaving).values())

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
    def notes(self) -> tuple[Note, ...]:
        """What the operator should know."""
        if not self.on:
            others = (one for one in self.containers() if not one.request.pod.kata)
            return (LEFT_BEHIND,) if any(others) else ()  # only NRI reports those
        why = self.suspended
        own = (Note("alloc-suspended", f"kata-pin allocates no CPUs: {why}", NoteLevel.WARNING),)
        return (*(own if why else ()), *self.news.notes)

    # ---- what changes without an event ---------------------------------------------------

    def follow_host(self) -> None:
        """Follow what changes without an event: the host's CPUs, and whether kata-pin decides."""
        if not self.on:
            return
        topology = self._node.current().topology
        changed = topology is not self._topology
        if changed:
            self._make_policy(topology)
        why = self.suspended
        if why != self._logged_suspended:
            self._logged_suspended = why
            log.warning("allocator: %s", f"suspended: {why}" if why else "deciding again")
        if self.decides and (changed or not self._decided):
            self._decided = False  # until what follows is stored
            granted = [Running(grant.request, grant.cpus) for grant in self.containers()]
            known = {one.request.container_id: one for one in (*granted, *self.reported())}
            self.reconcile([*known.values()])
        self._decided = self.decides

    def reported(self) -> Iterator[Running]:
        """Yield what a runtime has reported, but for containers left to another plugin."""
        for request, sandbox_id, cpuset in self.ledger.requests():
            yield Running(self.newest(request, sandbox_id), cpuset.cpus or None)

    def _make_policy(self, topology: HostTopology) -> None:
        self._topology = topology
        try:
            made = self._make(topology)
            settings = self._settings.settings
            self._policy = CheckedPolicy(self._settings.policy, made, topology, settings)
            self.problem = ""
        except KataPinError as error:
            self._policy, self.problem = None, str(error)
            log.error("allocator: %s", error)

    def containers(self) -> Iterator[Grant]:
        """Yield the grants of containers, without those of VMs."""
        return (one for one in self._state.grants.values() if one.kind is GrantKind.CONTAINER)

    def set_orders(self, orders: Mapping[str, CpuClass]) -> None:
        """Take the administrator's overrides; running containers are changed at once."""
        self._choices.orders = orders
        self._apply_choices("override")

    def set_annotations(self, annotations: Annotations) -> None:
        """Take the annotations that pods have now, by uid; pods not named keep theirs."""
        self._choices.annotations = annotations
        self._apply_choices("annotations", ordered=False)

    def newest(self, request: ContainerRequest, sandbox_id: str) -> ContainerRequest:
        """Return a request with its pod's override and annotations of now."""
        known = self._state.get(request.container_id)
        return self._choices.newest(
            request, sandbox_id, None if known is None else known.request.pod
        )

    def _apply_choices(self, why: str, *, ordered: bool = True) -> None:
        """Change every container whose pod's choices have changed; overrides only if `ordered`.

        No sandbox is known of another runtime's container while NRI is not connected.
        """
        for grant in list(self.containers()):
            entry = self.ledger.get(grant.container_id)
            sandbox_id = sandbox_of(grant.request.pod) or (entry.sandbox_id if entry else "")
            request = self.newest(grant.request, sandbox_id)
            if not ordered:
                known = grant.request.pod.ordered
                request = replace(request, pod=replace(request.pod, ordered=known))
            if request != grant.request:
                self.change(request, why)

    # ---- deciding ------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Store decisions and records of the block in one transaction, or none of them.

        Whatever follows from them is done after that, and only if they were stored.
        """
        before = self._state, self._leaving
        self._deferred = []
        try:
            with self._store.together():
                yield
        except BaseException:
            self._state, self._leaving = before
            raise
        finally:
            deferred, self._deferred = self._deferred, None
        for publish in deferred:
            publish()

    def left(self, sandbox_id: str) -> None:
        """Record that a sandbox is off its former CPUs: others may have them now."""
        if self._leaving:
            before = self.now
            self._leaving = after_pass(self._state, self._leaving, vm_of(sandbox_id))
            self._move(changes(before, self.now), "handed over")

    def release_sandbox(self, sandbox_id: str) -> None:
        """Release the grants of a sandbox that has ended."""
        ended = (one for one in self.containers() if sandbox_of(one.request.pod) == sandbox_id)
        self.release([one.container_id for one in ended], "the sandbox has ended")

    def admit(self, request: ContainerRequest, *, foreign: bool = False) -> Decision:
        """Give a new container its CPUs. `foreign`: another plugin has set its cpuset already."""
        if self._policy is None or self._idle():
            return Decision(self._state)
        self.conflicts.arrived(request, with_cpuset=foreign)
        owner = self.conflicts.owner(request, foreign=foreign)
        if owner is None:
            return self._take(self._policy.allocate(self._state, request), "allocated", request)
        decision = self._policy.decline(self._state, request, owner)
        fails = decision.refused is not None and decision.refused.strict
        if fails and not foreign and not self.conflicts.present:
            # the other plugin is only suspected, and without CPUs the container fails anyway
            decision = self._policy.allocate(self._state, request)
        return self._take(decision, "allocated", request)

    def change(self, request: ContainerRequest, why: str) -> Decision:
        """Give a running container what it requests now."""
        if self._policy is None or not self.decides:
            return Decision(self._state)
        return self._take(self._policy.change(self._state, request), why, request)

    def stop(self, why: str) -> None:
        """Decide nothing more while the daemon runs, for this reason."""
        self._stopped = why

    def forget(self) -> None:
        """Drop the state."""
        self._store.clear()
        self._state, self._leaving = AllocState(), {}

    def release(self, container_ids: Iterable[str], why: str) -> None:
        """Release the grants of containers that have ended.

        While the allocator is switched off no other grant changes: they say what to restore.
        """
        for container_id in container_ids:
            self.news.ended(container_id)
            if self.switched_off:
                state = self._state.without(container_id)
                if state is not self._state:
                    self._store.write(state)
                    self._state = state
            elif self._policy is not None and self._state.get(container_id) is not None:
                self._take(self._policy.release(self._state, container_id), why)

    def reconcile(self, running: Sequence[Running]) -> None:
        """Bring the state in line with what runs: everything there is."""
        if self._policy is not None and self.decides:
            self._take(self._policy.reconcile(self._state, running), "reconciled")

    def _take(
        self, decision: Decision, why: str, request: ContainerRequest | None = None
    ) -> Decision:
        """Store a decision, then do what follows from it."""
        before = self.now
        if decision.state != self._state or decision.changed:
            self._store.write(decision.state)
            if self._passes is not None:  # else no pass would end the handover
                self._leaving = still_to_leave(self._state, decision.state, self._leaving)
            self._state = decision.state
        moved = (*decision.changed, *changes(before, self.now))
        if self._deferred is None:
            self._publish(decision, why, request, moved)
        else:
            self._deferred.append(partial(self._publish, decision, why, request, moved))
        return decision

    def _publish(
        self, decision: Decision, why: str, request: ContainerRequest | None, moved: Iterable[Grant]
    ) -> None:
        for note in decision.notes:
            self.news.note(note)
        if request is not None:
            runs = self._state.get(request.container_id) is not None
            self.news.answer(request, decision.refused, runs=runs)
        self._move(moved, why)

    def _move(self, changed: Iterable[Grant], why: str) -> None:
        sandboxes = {sandbox_of(one.request.pod) for one in changed} - {""}
        if sandboxes and self._passes is not None:
            for sandbox_id in self._passes.request(sandboxes, why):
                self.left(sandbox_id)
