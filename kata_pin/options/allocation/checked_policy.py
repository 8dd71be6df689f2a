"""The policy that the configuration names, of whichever package, with every decision checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Final, get_args, get_origin

from msgspec import Struct
from msgspec.structs import fields, replace

from kata_pin.base.allocation import (
    AllocState,
    ContainerRequest,
    Decision,
    Grant,
    Refusal,
    RunningContainer,
)
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.config.tree import Config
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.errors import ConfigError, KataPinError, reason_of
from kata_pin.base.placement import Note
from kata_pin.base.values import CpuClass, GrantKind, NoteLevel
from kata_pin.options.allocation.adjustments import wrong_adjustment
from kata_pin.options.allocation.demand import StaticOptions, kept_creation
from kata_pin.options.allocation.policies import BUILTIN, create
from kata_pin.options.allocation.policy import GROUP, Factory, Policy
from kata_pin.options.allocation.shared_pool import initial_state

log = logging.getLogger(__name__)


# What must hold of a policy's decision, whichever package the policy is from.
#
# A decision is stored and applied to other people's containers, so it is checked first: no CPU is
# exclusive twice, no container uses a CPU outside its pools, no grant is lost or invented. Pure,
# and cheap enough for every event.


class ExpectedGrants(Struct, frozen=True):
    """What a decision is about: the state before, and which grants there are after it.

    Containers of `requests` must have one, those of `gone` must not. `refusable`: it may be a
    strict refusal, which leaves the state as it was.
    """

    before: AllocState
    requests: Collection[ContainerRequest] = ()
    replaceable: Collection[str] = ()
    gone: Collection[str] = ()
    refusable: bool = False


class Invariants:
    """The invariants for one host and one set of settings."""

    def __init__(self, topology: HostTopology, settings: Alloc) -> None:
        self._initial = initial_state(topology, settings)
        self._nodes = CpuSet(topology.nodes)
        self._never = settings.reserved | settings.housekeeping
        self._settings = settings

    def violation(self, decision: Decision, expected: ExpectedGrants) -> str:
        """Return what is wrong with a decision, empty if nothing is."""
        if not _is_decision(decision):
            return "its decision has values of wrong types"
        after, refused = decision.state, decision.refused
        for container_id, _ in decision.waiting:
            if container_id not in after.grants:
                return f"container {container_id} waits for CPUs and has no grant"
        if refused is not None and refused.strict:
            same = after == expected.before and not decision.changed
            return "" if expected.refusable and same else "it refuses what it cannot refuse"
        for grant in decision.changed:
            there = after.grants.get(grant.container_id)
            if grant is not there and grant != there:
                return f"a change of {grant.container_id} is not in its state"
        return (
            _missing(after, expected)
            or self._wrong_grant(after, expected)
            or self._wrong_pool(after, expected.before)
        )

    def _wrong_grant(self, after: AllocState, expected: ExpectedGrants) -> str:
        """Return what is wrong with a grant that is new or has changed."""
        before = expected.before.grants
        asked = {one.container_id: one for one in expected.requests}
        for name, grant in after.grants.items():
            old, request = before.get(name), grant.request
            if grant is old or (old is not None and _follows_pool(grant, old)):
                continue
            if not _typed(Grant)(grant):
                return f"the grant of {name} has values of wrong types"
            why = ""
            if request.container_id != name:
                why = f"another container's id, {request.container_id}"
            elif grant.kind is GrantKind.SANDBOX:
                why = "" if _has_vm(request, after) else "no VM"
            elif request != asked.get(name, old and old.request):
                why = "another request than was made"
            if not grant.exclusive and not grant.shared:
                why = why or "no CPUs at all"
            if not grant.mems <= self._nodes:
                why = why or f"memory nodes that there are not: {grant.mems - self._nodes}"
            if grant.own & self._never and (old is None or old.own != grant.own):
                why = why or "CPUs that are reserved or for housekeeping"
            if grant.own & after.taken - (EMPTY if old is None else old.own):
                why = why or "CPUs that are exclusive to containers of others"
            if old is None or (old.limits, old.creation) != (grant.limits, grant.creation):
                why = why or wrong_adjustment(grant, self._settings)
            if why:
                return f"the grant of {name} has {why}"
        return ""

    def _wrong_pool(self, after: AllocState, before: AllocState) -> str:
        """Return which CPU is in a pool where it cannot be."""
        for name in ("cpus", "reserved", "housekeeping"):
            wrong = getattr(after, name) - getattr(self._initial, name) - getattr(before, name)
            if wrong:
                return f"its {name} are more than the settings allow: {wrong}"
        if after.taken != before.taken:
            return "it changes which CPUs others hold"
        free, pool = after.cpus.bits, after.shared.bits
        for name, grant in after.grants.items():
            if grant.exclusive.bits & ~free:
                return f"exclusive CPUs of {name} are another's too, or not to be given out"
            free &= ~grant.exclusive.bits
        for name, grant in after.grants.items():
            overhead = after.housekeeping.bits if grant.kind is GrantKind.SANDBOX else 0
            allowed = free if grant.cpu_class is CpuClass.SHARE else pool | overhead
            if grant.shared is not None and grant.shared.bits & ~allowed:
                return f"shared CPUs of {name} are not in the shared pool"
        return ""


def in_pool(state: AllocState, request: ContainerRequest, policy: str, why: str) -> Decision:
    """Return the decision for a container that its policy failed on: it has the shared pool.

    A container with a grant keeps it. An empty state, of a policy that never decided, stays empty.
    """
    if state.get(request.container_id) is not None or not state.shared:
        return Decision(state)
    grant = Grant(request, policy, shared=state.shared, reasons=(why,))
    return Decision(state.with_grant(grant), (grant,))


def over(state: AllocState, container_id: str) -> frozenset[str]:
    """Return whose grants end with a container's: its own, and its VM's with the last one.

    A sandbox's id stands for all of its pod.
    """
    grant = state.get(container_id)
    if grant is None:
        return frozenset()
    pod = state.of_pod(grant.pod_uid)
    if grant.kind is GrantKind.SANDBOX:
        return frozenset(one.container_id for one in pod)
    vm = grant.request.pod.sandbox_id
    mates = [one for one in pod if one.request.pod.sandbox_id == vm and one.container_id != vm]
    return frozenset({container_id, vm} if vm and len(mates) == 1 else {container_id})


def ended(state: AllocState, running: Iterable[ContainerRequest]) -> frozenset[str]:
    """Return whose grants end when only these containers run: VMs without any too."""
    runs = {name for one in running for name in (one.container_id, one.pod.sandbox_id)}
    return frozenset(state.grants.keys() - runs)


def _missing(after: AllocState, expected: ExpectedGrants) -> str:
    """Return which container has lost its grant, has none, or still has one."""
    before = expected.before.grants
    for name in before.keys() - after.grants.keys() - {*expected.gone, *expected.replaceable}:
        if before[name].kind is GrantKind.CONTAINER:
            return f"container {name} has lost its grant"
    for name in expected.gone:
        if name in after.grants:
            return f"{name} has ended and still has its grant"
    for request in expected.requests:
        if request.container_id not in after.grants:
            return f"container {request.container_id} has no grant"
    return ""


def _has_vm(request: ContainerRequest, state: AllocState) -> bool:
    """Whether a VM is that of a container with a grant: the policy makes its request."""
    return any(
        one.kind is GrantKind.CONTAINER
        and one.request.pod.sandbox_id == request.container_id
        and one.request.pod == request.pod
        for one in state.grants.values()
    )


def _follows_pool(grant: Grant, old: Grant) -> bool:
    """Whether only the shared CPUs have changed, as for most grants when the pool changes."""
    return (
        grant.request is old.request
        and grant.exclusive is old.exclusive
        and grant.cpu_class is old.cpu_class is CpuClass.NONE
        and grant.kind is old.kind
        and grant.zone is old.zone
        and grant.mems is old.mems
        and grant.policy is old.policy
        and grant.reasons is old.reasons
        and grant.limits is old.limits
        and grant.creation is old.creation
        and isinstance(grant.shared, CpuSet)
        and bool(grant.shared)
    )


def _is_decision(value: object) -> bool:
    """Whether every value is of the type of its annotation: other packages' code may err.

    Grants are looked at one by one, if they are new or have changed.
    """
    if not isinstance(value, Decision) or not isinstance(value.changed, tuple):
        return False
    found = ((getattr(value, one.name), one) for one in fields(Decision) if one.name != "changed")
    return all(_typed(one.type)(its) for its, one in found)


@cache
def _typed(hint: object) -> Callable[[object], bool]:
    """Return what says whether a value is of a type, and each value in it; not those of mappings.

    A bool is no number, and only a StrEnum's member is another text: nothing else can be stored.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        kinds = [_typed(one) for one in inner]
        return lambda value: any(fits(value) for fits in kinds)
    if origin is tuple and inner[-1] is Ellipsis:
        each = _typed(inner[0])
        return lambda value: isinstance(value, tuple) and all(map(each, value))
    if origin is tuple:
        places = [_typed(one) for one in inner]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(places)
            and all(fits(one) for fits, one in zip(places, value, strict=True))
        )
    if origin is not None:
        return lambda value: isinstance(value, origin)
    assert isinstance(hint, type)
    if issubclass(hint, Struct):
        named = [(one.name, _typed(one.type)) for one in fields(hint)]
        return lambda value: (
            isinstance(value, hint) and all(fits(getattr(value, name)) for name, fits in named)
        )
    if hint in {int, str}:
        return lambda value: type(value) is hint or (hint is str and isinstance(value, StrEnum))
    return lambda value: isinstance(value, hint)


# Where the policy behind it fails, a new container gets the shared pool, a running one keeps its
# CPUs, and an ended one releases them. The failure is a note of the decision. Lifetime: the
# policy's.

MAX_SHOWN: Final = 200
"""Longest part of another package's error that is shown."""


class CheckedPolicy:
    """Asks a policy; the methods are those of Policy that decide."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        topology: HostTopology,
        settings: Alloc,
        wrong_device: Callable[[Grant | None], str],
    ) -> None:
        """Take what says which device of a new container is wrong; empty if none is."""
        self._name = name
        self._policy = policy
        self._invariants = Invariants(topology, settings)
        self._wrong_device = wrong_device

    def allocate(self, state: AllocState, request: ContainerRequest) -> Decision:
        """Give a new container its CPUs."""
        return self._asked(
            lambda: self._policy.allocate(state, request),
            ExpectedGrants(state, (request,), _replaced(state, request), refusable=True),
            admitted=request,
            new=request.container_id,
        )

    def change(self, state: AllocState, request: ContainerRequest) -> Decision:
        """Give a running container what it requests now."""
        return self._asked(
            lambda: self._policy.change(state, request),
            ExpectedGrants(state, (request,), _replaced(state, request)),
            admitted=request,
        )

    def release(self, state: AllocState, container_id: str) -> Decision:
        """Release a container's CPUs."""
        expected = ExpectedGrants(state, gone=over(state, container_id))
        return self._asked(lambda: self._policy.release(state, container_id), expected)

    def reconcile(self, state: AllocState, running: Sequence[RunningContainer]) -> Decision:
        """Bring a state in line with what runs."""
        requests = [one.request for one in running]
        expected = ExpectedGrants(state, requests, gone=ended(state, requests))
        return self._asked(lambda: self._policy.reconcile(state, running), expected)

    def decline(self, state: AllocState, request: ContainerRequest, refusal: Refusal) -> Decision:
        """Answer while the kubelet or another plugin decides."""
        expected = ExpectedGrants(state, refusable=True)
        return self._asked(lambda: self._policy.decline(state, request, refusal), expected)

    def _asked(
        self,
        ask: Callable[[], Decision],
        expected: ExpectedGrants,
        admitted: ContainerRequest | None = None,
        new: str = "",
    ) -> Decision:
        """Return the policy's decision; if it fails `admitted` gets the shared pool.

        Only the container `new` is being created.
        """
        try:
            decision = ask()
            why = self._invariants.violation(decision, expected)
            if not why and (wrong := self._wrong_device(decision.state.get(new))):
                why = f"the grant of {new} has {wrong}"
        except BaseException as error:
            log.debug("allocator: policy %s", self._name, exc_info=True)
            why = f"{type(error).__name__}: {reason_of(error)}"
        else:
            if not why:
                return kept_creation(expected.before, decision, new)
        text = f"policy {self._name!r} fails: {why}"[:MAX_SHOWN]
        note = Note("alloc-policy", text, NoteLevel.WARNING)
        state = expected.before.without(*expected.gone)
        fallback = Decision(state)
        if admitted is not None:
            fallback = in_pool(state, admitted, self._name, text)
        return replace(fallback, notes=(note,))


def _replaced(state: AllocState, request: ContainerRequest) -> list[str]:
    """Return the init containers that a new one of their pod replaces."""
    return [one.container_id for one in state.of_pod(request.pod.pod_uid) if one.request.init]


def make_policy(settings: Alloc, topology: HostTopology) -> Policy:
    """Return the policy for a host; raises ConfigError that names what is wrong.

    Other packages provide policies by entry points; only the named one is loaded. Its errors count
    as a wrong setting and never end the daemon.
    """
    name = settings.policy
    third = {} if name in BUILTIN else _third(name)
    try:
        return create(name, topology, settings, third)
    except KataPinError:
        raise
    except Exception as error:
        if name in BUILTIN:
            raise
        raise ConfigError(
            f"policy {name!r} cannot be made: {reason_of(error)}", key="alloc.policy"
        ) from error


def _third(name: str) -> dict[str, Factory]:
    from importlib.metadata import entry_points  # noqa: PLC0415 - costs time that few need

    found = entry_points(group=GROUP, name=name)
    try:
        return {entry.name: entry.load() for entry in found}
    except Exception as error:
        raise ConfigError(
            f"policy {name!r} cannot be loaded: {reason_of(error)}", key="alloc.policy"
        ) from error


# What is wrong with the settings of a policy on a node, for `config check`.

WITHOUT_OPTIONS: Final = "topology"
"""The policy of ours to which the options of the kubelet's static policy mean nothing."""


def problems(config: Config, topology: HostTopology) -> Iterator[ConfigError]:
    """Yield the wrong options of the policy, else why it cannot be made.

    CPUs that the node does not have are not named here: `config check` does that for all settings.
    """
    alloc = config.alloc
    if not alloc.on or alloc.policy in BUILTIN:
        wrong = tuple(_wrong_options(alloc))
        yield from wrong
        cpus = union((alloc.cpus, alloc.reserved, alloc.housekeeping))
        if not alloc.on or wrong or not cpus <= topology.present:
            return
    try:
        make_policy(alloc, topology)
    except KataPinError as error:
        key = error.key if isinstance(error, ConfigError) else ""
        inner = key if key.startswith("alloc.") else _alloc_key(key)
        yield ConfigError(error.message.removeprefix(f"{key}: "), key=inner, hint=error.hint)


def _wrong_options(alloc: Alloc) -> Iterator[ConfigError]:
    for name, text in alloc.options.items():
        key = f"alloc.options.{name}"
        if alloc.policy == WITHOUT_OPTIONS:
            yield ConfigError(
                f"the policy {alloc.policy} has no options; static and annotation have", key=key
            )
            continue
        try:
            StaticOptions.parse({name: text})
        except ConfigError as error:
            message = error.message.removeprefix(f"{name}: ")
            options = ", ".join(StaticOptions.names())
            yield ConfigError(f"{message}; options are {options}", key=key)


def _alloc_key(key: str) -> str:
    """Return the key of a setting as policies name it: by its last part, or as an option."""
    if key in StaticOptions.names():
        return f"alloc.options.{key}"
    return f"alloc.{key}" if key else "alloc.policy"
