"""The history document: what changed of each sandbox, when and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kata_pin.model.reports import VERSION, Cpus


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a sandbox."""

    time: str  #: end of the pass that made or found the change
    age_s: float  #: age of the change
    sandbox: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    state: str  #: One of `ok`, `drift`, `unpinned`, `released`, `no-vmm`, `gone` (sandbox ended)
    previous_state: str  #: the state before; empty in the first change of a sandbox
    mask: Cpus | None  #: pCPUs of the sandbox
    previous_mask: Cpus | None  #: the mask before
    threads: int  #: number of threads that work for the sandbox
    moved: int  #: number of threads that were moved
    triggers: tuple[str, ...]  #: what caused the pass, such as `hook:createRuntime`, `audit`
    latency_ms: float  #: from the first trigger until every affinity had been read back


class NodeEventKind(StrEnum):
    """What can happen to the node as a whole; also labels of metrics."""

    RELOADED = "reloaded"
    RELOAD_REFUSED = "reload-refused"
    ALLOC_SUSPENDED = "alloc-suspended"
    ALLOC_DECIDES = "alloc-decides"
    PLUGIN_CONFLICT = "plugin-conflict"
    EXCLUSIVE_CONFLICT = "exclusive-conflict"
    FOREIGN_TASKS = "foreign-tasks"
    QUIET_CHANGED = "quiet-changed"
    QUIET_WRITER = "quiet-writer"
    QUIET_FAILED = "quiet-failed"
    MEMORY_MOVING = "memory-moving"
    MEMORY_MOVED = "memory-moved"
    MEMORY_STAYS = "memory-stays"


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """Something that happened to the node as a whole."""

    time: str  #: when
    age_s: float  #: age of the event
    #: One of `reloaded`, `reload-refused`, `alloc-suspended`, `alloc-decides`, `plugin-conflict`
    #: (with another NRI plugin), `exclusive-conflict` (with another allocator), `foreign-tasks` (on
    #: exclusive pCPUs), `quiet-changed` (other pCPUs are kept quiet), `quiet-writer` (something
    #: else writes what keeps them quiet), `quiet-failed` (it cannot be written), `memory-moving`
    #: (to the NUMA nodes of a sandbox's vCPUs), `memory-moved` (all that was far from them),
    #: `memory-stays` (some of it does, and why)
    kind: str
    text: str  #: what happened, as logged


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryDocument:
    """Printed by `history`."""

    version: int = VERSION  #: version of the document
    kind: str = "history"  #: kind of the document
    time: str  #: when it was made
    changes: tuple[Change, ...]  #: one object per change, newest last
    events: tuple[NodeEvent, ...]  #: of the node, newest last; empty if a sandbox is named
