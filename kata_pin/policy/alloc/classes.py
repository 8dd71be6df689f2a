"""RDT and block-I/O classes of new containers, by the administrator's rules.

A pod gets the class of the first rule in `alloc.assign` that names one for it, or the one it chose
by annotation, if a rule in `alloc.allow` lets it. Runtimes apply classes only at creation, so a
running container keeps what it has. Pure. Out of scope: which classes a runtime knows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

from kata_pin.model.adjustment import NOTHING_MORE
from kata_pin.model.alloc import BLOCKIO_KEY, RDT_KEY, AllocState, Decision, Grant, PodRequest
from kata_pin.model.placement import Note, NoteLevel
from kata_pin.model.settings import AllocSettings

_MAX_SHOWN: Final = 40
"""Longest part of an annotation's value that is shown: users write it."""

_IN_VM: Final = "no {}: runtimes' classes have no effect on a Kata VM"


class ClassKind(NamedTuple):
    """A kind of class: its field of AtCreation, of the rules, its annotation, and its name."""

    field: str
    rule: str
    key: str
    title: str


KINDS: Final = (
    ClassKind("rdt_class", "rdt", RDT_KEY, "RDT class"),
    ClassKind("blockio_class", "blockio", BLOCKIO_KEY, "block-I/O class"),
)


class _Choice(NamedTuple):
    """A class, empty for none, and why."""

    name: str = ""
    reason: str = ""
    note: Note | None = None


def with_classes(decision: Decision, container_id: str, settings: AllocSettings) -> Decision:
    """Return a decision about a new container with the classes that the rules give it.

    A policy's own choice, or an earlier instance's class, stays if a rule names it for the pod.
    """
    grant = decision.state.get(container_id)
    if grant is None or (decision.refused is not None and decision.refused.strict):
        return decision
    pod = grant.request.pod
    creation, reasons, notes = grant.creation, [], []
    for kind in KINDS:
        choice = _choice(pod, kind, settings)
        own = getattr(creation, kind.field)
        name = choice.name or (own if own in permitted(pod, kind, settings) else "")
        if pod.kata and name:  # Kata removes both (virtcontainers/kata_agent.go)
            name, choice = "", choice._replace(reason=_IN_VM.format(kind.title))
        named: dict[str, Any] = {kind.field: name}
        creation = replace(creation, **named)
        reasons += [choice.reason] if choice.reason else []
        notes += [choice.note] if choice.note is not None else []
    if (creation, reasons, notes) == (grant.creation, [], []):
        return decision
    kept = [one for one in grant.reasons if one not in reasons]  # an earlier instance's
    classed = replace(grant, creation=creation, reasons=(*kept, *reasons))
    return replace(
        decision,
        state=decision.state.with_grant(classed),
        changed=tuple(classed if one == grant else one for one in decision.changed),
        notes=(*decision.notes, *notes),
    )


def permitted(pod: PodRequest, kind: ClassKind, settings: AllocSettings) -> frozenset[str]:
    """Return the classes that any rule names for a pod."""
    assigned = {
        getattr(one, kind.rule)
        for one in settings.assign
        if one.matches(pod.namespace, pod.handler)
    }
    return (_offered(pod, kind, settings) | assigned) - {""}


def kept_creation(before: AllocState, decision: Decision, new: str = "") -> Decision:
    """Return a decision in which only the container `new` gets anything at creation.

    The others run already: they keep what they were created with, whatever the policy says now.
    """
    fixed: dict[str, Grant] = {}
    for name, grant in decision.state.grants.items():
        old = before.grants.get(name)
        had = NOTHING_MORE if old is None else old.creation
        if name != new and grant is not old and grant.creation != had:
            fixed[name] = replace(grant, creation=had)
    if not fixed:
        return decision
    state = replace(decision.state, grants={**decision.state.grants, **fixed})
    changed = tuple(fixed.get(one.container_id, one) for one in decision.changed)
    return replace(decision, state=state, changed=changed)


def _offered(pod: PodRequest, kind: ClassKind, settings: AllocSettings) -> frozenset[str]:
    """Return the classes that a pod may choose by annotation."""
    rules = (one for one in settings.allow if one.matches(pod.namespace, pod.handler))
    return frozenset[str]().union(*(getattr(one, kind.rule) for one in rules))


def _choice(pod: PodRequest, kind: ClassKind, settings: AllocSettings) -> _Choice:
    rules = (one for one in settings.assign if one.matches(pod.namespace, pod.handler))
    default = next((name for one in rules if (name := getattr(one, kind.rule))), "")
    assigned = _Choice(default, f"{kind.title} {default} by alloc.assign" if default else "")
    value = pod.annotations.get(kind.key, "")
    if not value:
        return assigned
    if value in _offered(pod, kind, settings):
        return _Choice(value, f"{kind.title} {value} by annotation {kind.key}")
    text = f"annotation {kind.key} of pod {pod.title}: no allow rule permits "
    note = Note("class-not-allowed", f"{text}{value[:_MAX_SHOWN]!r}: ignored", NoteLevel.WARNING)
    return assigned._replace(note=note)
