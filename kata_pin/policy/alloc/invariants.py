"""Whether a policy's answer can be: what must hold of a state, whoever made it.

A policy can be another package's. What it answers is stored and written to containers of other
people, so it is looked at first: no CPU is exclusive twice, nobody uses a CPU that is not his, and
nobody's grant is lost or made up. Pure, and cheap enough for every event. Out of scope: whether the
answer is a good one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Final, TypeAlias

from kata_pin.model.alloc import (
    AllocState,
    ContainerRequest,
    Decision,
    Grant,
    GrantKind,
    PodRequest,
    Refusal,
    RefusalKind,
)
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.placement import Note, NoteLevel
from kata_pin.model.settings import AllocSettings, CpuClass
from kata_pin.model.topology import HostTopology
from kata_pin.policy.alloc.initial_state import initial_state

Types: TypeAlias = type | UnionType

_STATE: Final[Mapping[str, Types]] = {
    **dict.fromkeys(("cpus", "reserved", "housekeeping"), CpuSet),
    "grants": Mapping,
}
_NOTE: Final[Mapping[str, Types]] = {"code": str, "text": str, "level": NoteLevel}
_REFUSAL: Final[Mapping[str, Types]] = {"kind": RefusalKind, "message": str, "strict": bool}
_GRANT: Final[Mapping[str, Types]] = {
    "request": ContainerRequest,
    "policy": str,
    "cpu_class": CpuClass,
    "kind": GrantKind,
    "exclusive": CpuSet,
    "shared": CpuSet | None,
    "zone": CpuSet,
    "mems": CpuSet,
    "reasons": tuple,
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What an answer is about: the state before, and who is to have a grant after it.

    `requests` are those of containers that are to have one; `over` may have none any more, and
    `gone` must not. `refusable`: it may be a strict refusal, which leaves the state as it was.
    """

    before: AllocState
    requests: Collection[ContainerRequest] = ()
    over: Collection[str] = ()
    gone: Collection[str] = ()
    refusable: bool = False


class Soundness:
    """The check, for one host and one set of settings."""

    def __init__(self, topology: HostTopology, settings: AllocSettings) -> None:
        self._outset = initial_state(topology, settings)
        self._nodes = CpuSet(topology.nodes)
        self._never = (settings.reserved | settings.housekeeping).bits

    def flaw(self, decision: Decision, expected: Expected) -> str:
        """Return what is wrong with an answer, empty if it is sound.

        Raises whatever comes of an answer that is not even made of the right types.
        """
        why = _answer_flaw(decision)
        if why:
            return why
        after, before, refused = decision.state, expected.before, decision.refused
        if refused is not None and refused.strict:
            allowed = expected.refusable and after == before and not decision.changed
            return "" if allowed else "it refuses what it cannot refuse"
        return (
            self._misses(after, expected)
            or self._grants_flaw(after, expected)
            or self._pools_flaw(after, before)
            or _changes_flaw(decision)
        )

    def _misses(self, after: AllocState, expected: Expected) -> str:
        """Return who has no grant though he should, or has one still."""
        before = expected.before.grants
        for name in before.keys() - after.grants.keys():
            ended = name in expected.over or name in expected.gone
            if not ended and before[name].kind is GrantKind.CONTAINER:
                return f"container {name} has lost its grant"
        for name in expected.gone:
            if name in after.grants:
                return f"{name} is over and has its grant still"
        for request in expected.requests:
            if request.container_id not in after.grants:
                return f"container {request.container_id} has no grant"
        return ""

    def _grants_flaw(self, after: AllocState, expected: Expected) -> str:
        """Return what is wrong with a grant that is new or another one than before."""
        before = expected.before.grants
        asked = {one.container_id: one for one in expected.requests}
        vms = []
        for name, grant in after.grants.items():
            old = before.get(name)
            if grant is old or (old is not None and _follows(old, grant)):
                continue
            known = asked.get(name) or (None if old is None else old.request)
            why = _types_flaw(grant) or _request_flaw(name, grant, known)
            if not why and not grant.cpus:
                why = "no CPUs at all"
            if not why and not grant.mems <= self._nodes:
                why = f"memory nodes that there are not: {grant.mems - self._nodes}"
            if not why and grant.own.bits & self._never and (old is None or old.own != grant.own):
                why = "CPUs that are reserved or for housekeeping"
            if why:
                return f"the grant of {name} has {why}"
            if grant.kind is GrantKind.SANDBOX:
                vms.append(grant)
        return _vms_flaw(vms, after) if vms else ""

    def _pools_flaw(self, after: AllocState, before: AllocState) -> str:
        """Return which CPU is somewhere where it cannot be."""
        allowed = self._outset
        for name in ("cpus", "reserved", "housekeeping"):
            wrong = getattr(after, name) - getattr(allowed, name) - getattr(before, name)
            if wrong:
                return f"its {name} are more than the settings allow: {wrong}"
        cpus = after.cpus.bits
        housekeeping = after.housekeeping.bits
        seen = 0
        for name, grant in after.grants.items():
            exclusive = grant.exclusive.bits
            if exclusive:
                if exclusive & (seen | ~cpus):
                    return f"exclusive CPUs of {name} are another's too, or not to be given out"
                seen |= exclusive
        outside = ~(cpus & ~seen)
        for name, grant in after.grants.items():
            wrong = grant.shared.bits & outside if grant.shared is not None else 0
            if wrong and (grant.kind is not GrantKind.SANDBOX or wrong & ~housekeeping):
                return f"shared CPUs of {name} are not in the shared pool"
        return ""


def in_pool(state: AllocState, request: ContainerRequest, policy: str, why: str) -> Decision:
    """Return the decision for a container that nobody decided for: it has the shared pool.

    Who has a grant keeps it. An empty state, of a policy that never answered, stays empty.
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
    shares = [
        one for one in pod if one.kind is GrantKind.CONTAINER and one.request.pod.sandbox_id == vm
    ]
    return frozenset({container_id, vm} if vm and len(shares) == 1 else {container_id})


def ended(state: AllocState, running: Iterable[ContainerRequest]) -> frozenset[str]:
    """Return whose grants end when just these containers run: VMs without any too."""
    runs = {name for one in running for name in (one.container_id, one.pod.sandbox_id)}
    return frozenset(state.grants.keys() - runs)


def without(state: AllocState, names: Iterable[str]) -> Decision:
    """Return the decision that only takes these grants away."""
    for name in names:
        state = state.without(name)
    return Decision(state)


def _answer_flaw(decision: Decision) -> str:
    """Return what of an answer is of a wrong type, but for its grants."""
    if not (_typed(decision.state, AllocState) and _typed_fields(decision.state, _STATE)):
        return "its state is none"
    if not all(_typed(note, Note) and _typed_fields(note, _NOTE) for note in decision.notes):
        return "a note of its is none"
    refused = decision.refused
    sound = refused is None or (_typed(refused, Refusal) and _typed_fields(refused, _REFUSAL))
    return "" if sound else "its refusal is none"


def _follows(old: Grant, grant: Grant) -> bool:
    """Whether nothing differs but what a grant has of the shared pool: the case of most."""
    return (
        grant.request is old.request
        and grant.exclusive is old.exclusive
        and grant.cpu_class is old.cpu_class
        and grant.kind is old.kind
        and grant.zone is old.zone
        and grant.mems is old.mems
        and grant.policy is old.policy
        and grant.reasons is old.reasons
        and _typed(grant.shared, CpuSet)
        and grant.cpu_class is CpuClass.NONE
        and bool(grant.shared)
    )


def _types_flaw(grant: Grant) -> str:
    sound = (
        _typed(grant, Grant)
        and _typed_fields(grant, _GRANT)
        and all(_typed(reason, str) for reason in grant.reasons)
    )
    return "" if sound else "something of a wrong type"


def _typed_fields(value: object, fields: Mapping[str, Types]) -> bool:
    return all(isinstance(getattr(value, name), types) for name, types in fields.items())


def _typed(value: object, types: Types) -> bool:
    """Whether a value is what its annotation says: those of other people's code need not be."""
    return isinstance(value, types)


def _request_flaw(name: str, grant: Grant, known: ContainerRequest | None) -> str:
    """Return what is wrong with whom a grant is for."""
    request = grant.request
    if request.container_id != name:
        return f"another container's id, {request.container_id}"
    if grant.kind is GrantKind.SANDBOX:
        return ""
    if known is None:
        return "nobody who asked for it"
    return "" if request is known or request == known else "another request than was made"


def _vms_flaw(vms: Iterable[Grant], state: AllocState) -> str:
    """Return which VM is nobody's; its request is made by the policy, of a container's pod."""
    pods: dict[str, list[PodRequest]] = {}
    for one in state.grants.values():
        if one.kind is GrantKind.CONTAINER:
            pods.setdefault(one.request.pod.sandbox_id, []).append(one.request.pod)
    for vm in vms:
        name, request = vm.container_id, vm.request
        known = request.pod in pods.get(name, ())  # a runtime tells a pod anew with each container
        if not name or not known or not _typed(request.cpu_millis, int):
            return f"the grant of {name} has no VM"
    return ""


def _changes_flaw(decision: Decision) -> str:
    for grant in decision.changed:
        there = decision.state.grants.get(grant.container_id)
        if grant is not there and grant != there:
            return f"a change of {grant.container_id} is not in its state"
    return ""
