"""What a policy would give: `alloc what-if` and `alloc compare`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base import placement
from kata_pin.base.allocation import (
    AllocState,
    AttachedDevice,
    Candidate,
    ContainerRequest,
    Decision,
    Grant,
    PodRequest,
    Qos,
    RunningContainer,
)
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.documents import pools
from kata_pin.base.documents.document import Note
from kata_pin.base.documents.pools import ComparedContainer, ComparedVerdict, Comparison, WhatIf
from kata_pin.base.documents.state import State
from kata_pin.base.errors import KataPinError
from kata_pin.base.placement import KubeletState
from kata_pin.base.values import CpuClass, GrantKind, NoteLevel
from kata_pin.cli.reports.pcpus import parse
from kata_pin.cli.reports.words import safe
from kata_pin.options.allocation.policy import Policy
from kata_pin.options.allocation.shared_pool import pools_of


def as_kubelet(state: AllocState) -> KubeletState:
    """Return the state as a checkpoint of the static policy: exclusive CPUs by pod and container.

    The default set is all CPUs that are not exclusive, housekeeping CPUs included. A VM's own CPUs
    are entered under the sandbox's id; the format cannot represent CPUs chosen by SHARE containers.
    """
    entries: dict[str, dict[str, CpuSet]] = {}
    for grant in state.grants.values():
        if grant.exclusive:
            of_pod = entries.setdefault(grant.pod_uid, {})
            of_pod[grant.request.name or grant.container_id] = grant.exclusive
    return KubeletState("static", state.shared | state.housekeeping, entries)


# The documents of `alloc what-if` and `alloc compare`: what a policy would give.
#
# The node's grants come from the state document, so that a member of the daemon's group can ask.
# Another host has no grants but the pCPUs given as taken. If kata-pin does not allocate CPUs, a
# policy is assumed to take over from the kubelet: a container with the same CPUs would not be
# moved.

ID: Final = "what-if"
"""The id of the hypothetical container, and the uid of its pod."""


class Question(Struct, frozen=True):
    """A container with so many thousandths of a CPU, as request and as limit.

    `cpu_class` overrides the policy's own rule. `pod` names the pod of the node that it would join.
    `devices` are those that it would have.
    """

    millis: int
    cpu_class: CpuClass | None = None
    kata: bool = True
    pod: str = ""
    devices: tuple[AttachedDevice, ...] = ()


def occupied(policy: Policy, document: State | None, taken: CpuSet) -> AllocState:
    """Return the state to ask about: the node's grants, and the pCPUs that are taken."""
    state = policy.start()
    if document is not None:
        state = _with_grants(state, document)
        kubelet = document.node.kubelet
        if kubelet is not None and kubelet.policy == "static":
            taken |= state.cpus - parse(kubelet.default)
        if document.allocation is not None:
            taken |= parse(document.allocation.pools.taken)
    return replace(state, taken=taken & state.cpus)


def answer(policy: Policy, state: AllocState, question: Question) -> WhatIf:
    """Return the document; raises KataPinError for a pod that is not there."""
    request = _request(state, question)
    decision = policy.allocate(state, request)
    grant = decision.state.get(request.container_id)
    vm = decision.state.get(request.pod.sandbox_id) if request.pod.sandbox_id else None
    return WhatIf(
        policy=policy.name,
        pod=question.pod,
        millis=question.millis,
        near=tuple(device.title for device in question.devices),
        grant=None if grant is None else _granted(grant),
        vm=None if vm is None else _granted(vm),
        refused=_refused(decision),
        others=tuple(one.container_id for one in _others(decision, request)),
        before=pools_of(state),
        after=pools_of(decision.state),
        candidates=tuple(_candidate(one) for one in policy.candidates(state, request)),
        notes=tuple(
            Note(one.code, one.text, one.level)
            for one in (*decision.notes, *_unheeded(policy, question))
        ),
    )


def _unheeded(policy: Policy, question: Question) -> Iterator[placement.Note]:
    """Yield that a policy of the kubelet's algorithms considers no devices."""
    if question.devices and policy.name in {"static", "annotation"}:
        text = f"policy {policy.name} does not place CPUs near devices: topology does"
        yield placement.Note("alloc-devices", text, NoteLevel.INFO)


def state_of(allocation: pools.Allocation) -> AllocState:
    """Return the state that a document shows, whether it is in force or not."""
    found = allocation.pools
    taken = parse(found.taken)
    cpus = parse(found.shared) | parse(found.exclusive) | taken
    grants = {one.id: _grant(one, found.shared) for one in allocation.grants}
    return AllocState(cpus, parse(found.reserved), parse(found.housekeeping), grants, taken)


def _with_grants(state: AllocState, document: State) -> AllocState:
    """Return the state with the grants that the document shows in force."""
    allocation = document.allocation
    if allocation is None or allocation.suspended:
        return state
    for one in allocation.grants:
        grant = _grant(one, allocation.pools.shared)
        if grant.exclusive <= state.shared and grant.bound <= state.shared:
            state = state.with_grant(grant)
    return state


def _grant(one: pools.Grant, pool: str) -> Grant:
    """Return a grant of the document. Who follows a part of the pool follows it here too."""
    kind = GrantKind(one.kind)
    pod = PodRequest(
        one.pod_uid or one.sandbox,
        name=one.pod,
        kata=one.kata,
        sandbox_id=one.sandbox,
        overhead_millis=one.millis if kind is GrantKind.SANDBOX else 0,
    )
    shared = None if one.shared is None else parse(one.shared)
    return Grant(
        ContainerRequest(one.id, pod, one.name, one.millis),
        one.policy,
        CpuClass(one.cpu_class),
        exclusive=parse(one.exclusive),
        shared=shared,
        zone=EMPTY if one.shared in {None, pool} else shared or EMPTY,
        kind=kind,
    )


def _request(state: AllocState, question: Question) -> ContainerRequest:
    sandbox = ID + "-vm" if question.kata else ""
    uid = ID
    if question.pod:
        member = _member(state, question.pod)
        uid, sandbox = member.pod_uid, member.request.pod.sandbox_id
    pod = PodRequest(
        uid,
        name=question.pod or ID,
        qos=Qos.GUARANTEED,
        kata=bool(sandbox),
        sandbox_id=sandbox,
        ordered=question.cpu_class,
    )
    quota = question.millis * 100 or None
    return ContainerRequest(ID, pod, ID, question.millis, quota_us=quota, devices=question.devices)


def _member(state: AllocState, pod: str) -> Grant:
    for grant in state.grants.values():
        if pod in {grant.request.pod.name, grant.pod_uid}:
            return grant
    raise KataPinError(
        f"no pod {safe(pod)!r} with a grant on this node", hint="kata-pin pools lists them"
    )


def _others(decision: Decision, request: ContainerRequest) -> list[Grant]:
    own = {request.container_id, request.pod.sandbox_id}
    return [grant for grant in decision.changed if grant.container_id not in own]


def _granted(grant: Grant) -> pools.Granted:
    return pools.Granted(
        cpu_class=grant.cpu_class,
        cpus=str(grant.cpus),
        exclusive=str(grant.exclusive),
        shared=None if grant.shared is None else str(grant.shared),
        mems=str(grant.mems),
        reasons=tuple(grant.reasons),
    )


def _refused(decision: Decision) -> pools.Refusal | None:
    refused = decision.refused
    if refused is None:
        return None
    return pools.Refusal(refused.kind, refused.message, refused.strict)


def _candidate(one: Candidate) -> pools.Candidate:
    keys = tuple(pools.SortKey(name, value) for name, value in one.keys)
    return pools.Candidate(one.level, one.unit, str(one.cpus), str(one.taken), keys)


SAME: Final = "same"
MOVED: Final = "other pCPUs"
KUBELET_ONLY: Final = "kubelet only"
OURS_ONLY: Final = "kata-pin only"


def taken_over(kubelet: KubeletState, policy: Policy) -> KubeletState:
    """Return what a policy would make of a node that the kubelet decided until now.

    Each entry stands for a container of a Guaranteed pod that requests as many CPUs as it has, and
    has asked for exclusive ones where the policy wants to be asked. No VM is supposed behind it.
    """
    running = []
    for uid, name, cpus in _entries(kubelet):
        pod = PodRequest(uid, qos=Qos.GUARANTEED, ordered=CpuClass.EXCLUSIVE)
        asked, quota = len(cpus) * 1000, len(cpus) * 100_000
        request = ContainerRequest(f"{uid}/{name}", pod, name, asked, quota_us=quota)
        running.append(RunningContainer(request, cpus))
    return as_kubelet(policy.reconcile(policy.start(), running).state)


def comparison(
    kubelet: KubeletState, ours: KubeletState, *, source: str, policy: str, hypothetical: bool
) -> Comparison:
    """Return the document. `hypothetical`: ours is what `policy` would give, not what it gave."""
    theirs = {(uid, name): cpus for uid, name, cpus in _entries(kubelet)}
    own = {(uid, name): cpus for uid, name, cpus in _entries(ours)}
    rows = [_row(key, theirs.get(key, EMPTY), own.get(key, EMPTY)) for key in {**theirs, **own}]
    return Comparison(
        checkpoint=source,
        kubelet_policy=kubelet.policy,
        policy=policy,
        hypothetical=hypothetical,
        same=all(row.verdict == SAME for row in rows) and kubelet.default == ours.default,
        kubelet_shared=str(kubelet.default),
        kata_pin_shared=str(ours.default),
        containers=tuple(rows),
    )


def _entries(state: KubeletState) -> Iterator[tuple[str, str, CpuSet]]:
    for uid, containers in state.entries.items():
        for name, cpus in containers.items():
            if cpus:
                yield uid, name, cpus


def _row(key: tuple[str, str], kubelet: CpuSet, ours: CpuSet) -> ComparedContainer:
    verdict: ComparedVerdict = SAME if kubelet == ours else MOVED
    if not ours:
        verdict = KUBELET_ONLY
    elif not kubelet:
        verdict = OURS_ONLY
    uid, name = key
    return ComparedContainer(uid, name, str(kubelet), str(ours), verdict)
