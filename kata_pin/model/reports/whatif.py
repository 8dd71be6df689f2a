"""The what-if document: what a policy would give a container."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION, Cpus, Note
from kata_pin.model.reports.pools import Pools


@dataclass(frozen=True, slots=True)
class Granted:
    """The pCPUs that a container or its VM would get."""

    cpu_class: str  #: One of `none`, `share`, `exclusive`
    cpus: Cpus  #: all pCPUs that it could use
    exclusive: Cpus  #: its exclusive pCPUs
    shared: Cpus | None  #: its pCPUs of the shared pool; null: none
    mems: Cpus  #: NUMA nodes of its memory; empty: any
    reasons: tuple[str, ...]  #: why these pCPUs


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the container would not get what it requests."""

    #: One of `kubelet-static`, `foreign-plugin`, `not-enough-cpus`, `shared-minimum`, `alignment`
    kind: str
    message: str  #: the reason in words
    strict: bool  #: whether its creation would fail; false: it would run in the shared pool


@dataclass(frozen=True, slots=True)
class SortKey:
    """One value that candidates are compared by."""

    name: str  #: its name; docs/allocation.md explains them
    value: int  #: smaller comes first


@dataclass(frozen=True, slots=True)
class Candidate:
    """A part of the node that the policy considered."""

    level: str  #: One of `llc`, `node`, `package`, `host`, `core`, `cpu`, `pool` (the shared pool)
    unit: int  #: lowest pCPU of a cache or core, else the number of the unit
    cpus: Cpus  #: its free pCPUs
    taken: Cpus  #: pCPUs taken from it
    keys: tuple[SortKey, ...]  #: what it was compared by, most important first


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Printed by `alloc what-if`."""

    version: int = VERSION  #: version of the document
    kind: str = "what-if"  #: kind of the document
    policy: str  #: the policy that was asked
    pod: str  #: the pod of this node that the container would join; empty: a new pod
    millis: int  #: CPU request and limit in thousandths of a CPU
    grant: Granted | None  #: what the container would get; null: its creation would fail
    vm: Granted | None  #: what its VM would get; null: no VM
    refused: Refusal | None  #: why it would not get what it requests; null: it would
    others: tuple[str, ...]  #: ids of the containers and VMs whose pCPUs would change
    before: Pools  #: the pools without the container
    after: Pools  #: the pools with it
    candidates: tuple[Candidate, ...]  #: what was considered, in this order
    notes: tuple[Note, ...]  #: what the operator should know
