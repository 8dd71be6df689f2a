"""Our own allocator at work: who gets which CPUs on this node (DESIGN D8, D9, D14, D15).

Off by default. It stands aside, with a reason, while the kubelet's static policy or another NRI
plugin decides; nothing is written then, and its grants mean nothing. Each decision is stored before
anybody is told of it, so that a daemon that is killed finds the same state. Lost state, another
host and offline CPUs are reconciled with what runs; nothing here keeps the daemon from starting.

Lifetime: the daemon's; everything runs in the event loop's thread, between two awaits. Out of
scope: the rules (policy/alloc), delivery to the runtime (delivery.py), affinities (engine.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from kata_pin.config.alloc import Alloc
from kata_pin.daemon.allocation.checked_policy import CheckedPolicy
from kata_pin.daemon.allocation.notices import AllocNews
from kata_pin.daemon.allocation.plugin_conflicts import BEFORE, SUSPECTED, PluginConflicts
from kata_pin.daemon.allocation.requests import request_of_record
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
    PodRequest,
    Refusal,
    RefusalKind,
    Running,
)
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.node import Node
from kata_pin.model.placement import Note, NoteLevel
from kata_pin.model.sandbox import Container, ContainerKind
from kata_pin.model.settings import CpuClass
from kata_pin.model.topology import HostTopology
from kata_pin.policy.alloc.allotment import (
    Allotment,
    allot,
    nothing_allotted,
    sandbox_of,
    vm_of,
)
from kata_pin.policy.alloc.handover import Once, after_pass, held_back, in_force, once_exclusive
from kata_pin.policy.alloc.policy import Policy
from kata_pin.policy.alloc.refusals import other_owner
from kata_pin.policy.alloc.shared_pool import changes

log = logging.getLogger(__name__)

LEFT_BEHIND: Final = Note(
    "alloc-left-behind",
    "containers may have cpusets of kata-pin's from before alloc.policy was none: they are given "
    "all CPUs when NRI is connected",
)

Make = Callable[[HostTopology], Policy]
"""Makes the policy for a host; raises ConfigError."""

Told = Callable[[Collection[str], str], None]
"""Hears which sandboxes have other CPUs, and why."""


class Allocator:
    """Holds the state and takes decisions; raises StateError when one cannot be stored."""

    def __init__(self, settings: Alloc, node: NodeWatch, store: AllocStore, make: Make) -> None:
        self.problem = ""
        self.guarantee = Guarantee.SANDBOXES
        self.news = AllocNews()
        self.conflicts = PluginConflicts()
        self.running: Callable[[], Iterable[Running]] = tuple  # as a runtime tells
        self._settings = settings
        self._node = node
        self._store = store
        self._make = make
        self._policy: CheckedPolicy | None = None
        self._topology: HostTopology | None = None
        self._decided = False
        self._stopped = ""
        self._state = store.read() or AllocState()
        self._once: Once = {}
        self._now: tuple[AllocState, Once, AllocState] | None = None
        self._orders: Mapping[str, CpuClass] = {}
        self._annotations: Mapping[str, Mapping[str, str]] = {}
        self._told: Told | None = None
        self._aside_told = ""
        self._untold: list[Callable[[], None]] | None = None

    # ---- looking -------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Whether the configuration wants an allocator."""
        return self._settings.on

    @property
    def policy_name(self) -> str:
        """The policy's name."""
        return self._settings.policy

    @property
    def state(self) -> AllocState:
        """Who has what, also while it means nothing."""
        return self._state

    @property
    def now(self) -> AllocState:
        """The state as it is to be acted on: without CPUs that somebody still has to leave."""
        known = self._now
        if known is None or known[0] is not self._state or known[1] is not self._once:
            known = self._state, self._once, in_force(self._state, self._once)
            self._now = known
        return known[2]

    @property
    def held_back(self) -> CpuSet:
        """The CPUs that nobody gets until a pass over the sandbox that leaves them has ended."""
        return union(held_back(self._state, self._once).values())

    @property
    def aside(self) -> str:
        """Why nothing is decided now, empty while it is."""
        idle = self._idle()
        if idle:
            return idle
        owner = other_owner(None, self.conflicts.present)
        return owner.message if owner is not None else self.problem

    def _idle(self) -> str:
        """Return why kata-pin only observes, whoever asks for what; empty if it does not."""
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
        """Whether grants are in force."""
        return not self.aside

    @property
    def effective(self) -> AllocState:
        """The state by which containers are to have cpusets: none while grants are not in force."""
        return self.now if self.decides else AllocState()

    @property
    def switched_off(self) -> bool:
        """Whether nothing is to be decided here, whoever else does."""
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
            return (LEFT_BEHIND,) if any(others) else ()  # those are told by NRI only
        why = self.aside
        own = (Note("alloc-aside", f"kata-pin allots no CPUs: {why}", NoteLevel.WARNING),)
        return (*(own if why else ()), *self.news.notes)

    def view(self, containers: Sequence[Container]) -> Allotment:
        """Return what a pass over a sandbox needs to know, with its containers as recorded.

        New containers are given their CPUs first, ended ones lose theirs: no event is needed.
        """
        if self.on and self._told is not None:
            self.follow_host()
            if not self.aside:
                self._settle(containers)
        return self.granted(containers)

    def granted(self, containers: Sequence[Container]) -> Allotment:
        """Return what the grants made so far mean for these containers; decides nothing."""
        if not self.on or self.aside:
            return nothing_allotted(containers)
        return allot(containers, self.now)

    def _settle(self, containers: Sequence[Container]) -> None:
        over = [one.id for one in containers if not one.state.counts]
        self.release(over, "its containers have stopped")
        for one in containers:
            if one.kind is not ContainerKind.CONTAINER or not one.state.counts:
                continue
            ordered = self.ordered(one.pod_namespace, one.pod_name, one.sandbox_id)
            request = request_of_record(one, ordered)
            grant = self._state.get(one.id)
            if grant is not None:
                self._follow_record(grant.request, request)
            elif one.cpus is None:
                self.change(request, "it runs already")

    def _follow_record(self, known: ContainerRequest, told: ContainerRequest) -> None:
        """Follow what records tell anew: a later source may know names and sizes that none had.

        With NRI the runtime tells, and knows annotations too.
        """
        if self.guarantee is Guarantee.NODE:
            return
        now = replace(told, pod=replace(told.pod, annotations=known.pod.annotations))
        if told.cpu_millis == 0 and told.quota_us is None:
            size = (known.cpu_millis, known.quota_us, known.period_us)
            now = replace(now, cpu_millis=size[0], quota_us=size[1], period_us=size[2])
        if now != known:
            self.change(now, "its record")

    # ---- starting, and what changes under us ---------------------------------------------

    def begin(self, told: Told) -> None:
        """Bring the state in line with the host, and decide from now on."""
        self._told = told
        self.follow_host()

    def follow_host(self) -> None:
        """Follow what changes without an event: the host's CPUs, and who else decides."""
        if not self.on:
            return
        topology = self._node.current().topology
        anew = topology is not self._topology
        if anew:
            self._make_policy(topology)
        self._tell_aside()
        if self.decides and (anew or not self._decided):
            self._decided = False  # until what follows is stored
            granted = [Running(grant.request, grant.cpus) for grant in self.containers()]
            known = {one.request.container_id: one for one in (*granted, *self.running())}
            self.reconcile([*known.values()])
        self._decided = self.decides

    def _tell_aside(self) -> None:
        """Tell once that kata-pin stands aside, and why, and that it does no more."""
        why = self.aside
        if why != self._aside_told:
            self._aside_told = why
            log.warning("allocator: %s", f"stands aside: {why}" if why else "decides again")

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
        """Yield the grants of containers, not those of VMs."""
        return (one for one in self._state.grants.values() if one.kind is GrantKind.CONTAINER)

    def ordered(self, namespace: str, name: str, sandbox_id: str) -> CpuClass | None:
        """Return what the administrator ordered for a pod."""
        by_name = self._orders.get(f"{namespace}/{name}") if name else None
        return by_name or self._orders.get(sandbox_id)

    def set_orders(self, orders: Mapping[str, CpuClass]) -> None:
        """Take the administrator's orders; running containers are changed at once."""
        self._orders = orders
        self._rewrite(self._as_ordered, "orders")

    def set_annotations(self, annotations: Mapping[str, Mapping[str, str]]) -> None:
        """Take the annotations that pods have now, by uid; those not named keep theirs."""

        def rewritten(pod: PodRequest) -> PodRequest:
            return replace(pod, annotations=annotations.get(pod.pod_uid, pod.annotations))

        self._annotations = annotations
        self._rewrite(rewritten, "annotations")

    def newest(self, request: ContainerRequest) -> ContainerRequest:
        """Return a request with the annotations that its pod has now, as far as they are known.

        A runtime tells those of the pod's creation for ever; records tell none.
        """
        known = self._state.get(request.container_id)
        kept = {} if known is None else known.request.pod.annotations
        annotations = self._annotations.get(request.pod.pod_uid, kept or request.pod.annotations)
        return replace(request, pod=replace(request.pod, annotations=annotations))

    def _as_ordered(self, pod: PodRequest) -> PodRequest:
        return replace(pod, ordered=self.ordered(pod.namespace, pod.name, sandbox_of(pod)))

    def _rewrite(self, rewritten: Callable[[PodRequest], PodRequest], why: str) -> None:
        """Change every container whose pod is not what it was."""
        for grant in list(self.containers()):
            pod = rewritten(grant.request.pod)
            if pod != grant.request.pod:
                self.change(replace(grant.request, pod=pod), why)

    # ---- deciding ------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Store decisions and records of the block in one transaction, or nothing of it.

        What follows from them is made known after that, and only if it was stored.
        """
        before = self._state, self._once
        self._untold = []
        try:
            with self._store.together():
                yield
        except BaseException:
            self._state, self._once = before
            raise
        finally:
            untold, self._untold = self._untold, None
        for tell in untold:
            tell()

    def left(self, sandbox_id: str) -> None:
        """Take note that a pass over a sandbox has ended: others may have what it has left."""
        if self._once:
            before = self.now
            self._once = after_pass(self._state, self._once, vm_of(sandbox_id))
            self._move(changes(before, self.now), "handed over")

    def release_sandbox(self, sandbox_id: str) -> None:
        """Take back what a sandbox had that is over."""
        over = [
            one.container_id
            for one in self.containers()
            if sandbox_of(one.request.pod) == sandbox_id
        ]
        self.release(over, "the sandbox is over")

    def admit(self, request: ContainerRequest, *, foreign: bool = False) -> Decision:
        """Give a new container its CPUs. `foreign`: somebody else gave it a cpuset already."""
        if self._policy is None or self._idle():
            return Decision(self._state)
        self.conflicts.arrived(request, with_cpuset=foreign)
        owner = self._owner(request, foreign=foreign)
        decision = None
        if owner is not None:
            decision = self._policy.decline(self._state, request, owner)
        if decision is None or (not foreign and self._rather_tried(decision)):
            decision = self._policy.allocate(self._state, request)
        return self._take(decision, "allocated", request)

    def _owner(self, request: ContainerRequest, *, foreign: bool) -> Refusal | None:
        """Return why a new container is left alone, None if it is not."""
        if foreign:
            return other_owner(None, (BEFORE,))
        if not self.conflicts.leaves_alone(request):
            return None
        known = other_owner(None, self.conflicts.present)
        return known or Refusal(RefusalKind.FOREIGN_PLUGIN, SUSPECTED)

    def _rather_tried(self, decision: Decision) -> bool:
        """Whether a container is tried again: it fails rather than goes without its CPUs.

        That is not done beside a plugin that is known to be there.
        """
        refused = decision.refused
        return refused is not None and refused.strict and not self.conflicts.present

    def change(self, request: ContainerRequest, why: str) -> Decision:
        """Give a running container what it asks for now."""
        if self._policy is None or not self.decides:
            return Decision(self._state)
        return self._take(self._policy.change(self._state, request), why, request)

    def stop(self, why: str) -> None:
        """Decide nothing more, for this reason, while the daemon runs."""
        self._stopped = why

    def forget(self) -> None:
        """Drop the state: it is over."""
        self._store.clear()
        self._state, self._once = AllocState(), {}

    def release(self, container_ids: Iterable[str], why: str) -> None:
        """Take back what containers had that are over.

        While the allocator is switched off nobody else's grant changes by it: they tell what is to
        be given back.
        """
        for container_id in container_ids:
            self.news.over(container_id)
            if self.switched_off:
                self._drop(container_id)
            elif self._policy is not None and self._state.get(container_id) is not None:
                self._take(self._policy.release(self._state, container_id), why)

    def _drop(self, container_id: str) -> None:
        state = self._state.without(container_id)
        if state is not self._state:
            self._store.write(state)
            self._state = state

    def reconcile(self, running: Sequence[Running]) -> None:
        """Bring the state in line with what runs: everything there is."""
        if self._policy is not None and self.decides:
            self._take(self._policy.reconcile(self._state, running), "reconciled")

    def _take(
        self, decision: Decision, why: str, request: ContainerRequest | None = None
    ) -> Decision:
        """Store a decision, then make it known."""
        before = self.now
        if decision.state != self._state or decision.changed:
            self._store.write(decision.state)
            if self._told is not None:  # else nobody's passes would end it
                self._once = once_exclusive(self._state, decision.state, self._once)
            self._state = decision.state
        moved = (*decision.changed, *changes(before, self.now))
        if self._untold is None:
            self._tell(decision, why, request, moved)
        else:
            self._untold.append(partial(self._tell, decision, why, request, moved))
        return decision

    def _tell(
        self,
        decision: Decision,
        why: str,
        request: ContainerRequest | None,
        moved: Iterable[Grant],
    ) -> None:
        for note in decision.notes:
            self.news.note(note)
        if request is not None:
            runs = self._state.get(request.container_id) is not None
            self.news.answer(request, decision.refused, runs=runs)
        self._move(moved, why)

    def _move(self, changed: Iterable[Grant], why: str) -> None:
        sandboxes = {sandbox_of(one.request.pod) for one in changed} - {""}
        if sandboxes and self._told is not None:
            self._told(sandboxes, why)
