"""Documents that answer one command each.

The commands are bind, pin, explain, history, map, metrics, names, and those of files and settings.
"""

from enum import StrEnum
from typing import Any, Literal

from msgspec import Struct

from kata_pin.base.documents.document import VERSION, Cpus, Daemon, Document, Note, RefusedReload
from kata_pin.base.documents.pools import KeptCpuset
from kata_pin.base.documents.state import Guest
from kata_pin.base.values import ChangeState, Outcome, SandboxState

# What `bind` did: the CPUs that an administrator named, and where each thread is.


class BoundThread(Struct, frozen=True):
    """One thread that kata-pin places."""

    tid: int  #: thread id
    label: str  #: role with the vCPU's index
    affinity: Cpus  #: its CPU affinity; with `dry_run` as it is now
    expected: Cpus  #: where it should run
    reason: str  #: why these pCPUs


class BoundSandbox(Struct, frozen=True):
    """One sandbox whose binding was made, tried or cleared."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    vcpus: Cpus  #: bound vCPUs; empty: none, the settings decide
    cpus: Cpus  #: their pCPUs: one each, in order, if there are as many; else all of them
    overhead: Cpus  #: pCPUs of everything else; empty: the settings decide
    until: str  #: when it ends; empty: when it is cleared
    threads: tuple[BoundThread, ...]  #: one object per thread


class BindDocument(Document, frozen=True, kw_only=True):
    """Printed by `bind`."""

    kind: str = "bind"  #: kind of the document
    dry_run: bool  #: whether nothing was set
    sandboxes: tuple[BoundSandbox, ...]  #: one object per sandbox


# What `pin`, `unpin` and `reconcile` did.

AppliedKind = Literal["pin", "unpin", "reconcile"]
"""What was asked for."""


class Result(Struct, frozen=True):
    """One thread whose affinity was set."""

    tid: int  #: thread id
    before: Cpus  #: affinity before
    target: Cpus  #: affinity that was set
    after: Cpus | None  #: affinity read back; null: it could not be read
    #: `clipped`: fewer pCPUs than requested; `gone`: exited; `reused`: the tid now is another
    #: thread; `refused`: EINVAL; `denied`: EPERM; `unverified`: EACCES, the broker does not accept
    #: the process; `fixed`: cannot be moved
    outcome: Outcome
    reason: str  #: why these pCPUs


class AppliedSandbox(Struct, frozen=True):
    """What was done to one sandbox."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    state: SandboxState  #: as in `state`
    vmm_problem: str  #: why there is no VMM
    threads: int  #: number of its threads
    duration_ms: float | None  #: duration of the pass
    results: tuple[Result, ...]  #: one object per thread that was moved
    notes: tuple[Note, ...]  #: what the operator should know


class Applied(Document, frozen=True, kw_only=True):
    """Printed by `pin` and `unpin`; also the daemon's answer to `reconcile` and `release`."""

    kind: AppliedKind  #: what was asked for
    sandboxes: tuple[AppliedSandbox, ...]  #: one object per sandbox
    #: containers that keep a cpuset of the allocator, after `release` (uninstall) only
    cpusets_kept: tuple[KeptCpuset, ...] = ()
    #: what `quiet` changed and could not be restored, and why; after `release` only
    quiet_kept: tuple[str, ...] = ()
    #: options that failed to restore what they changed, and why
    options_failed: tuple[str, ...] = ()


# The explain document: why a sandbox's threads are where they are.


class Explanation(Document, frozen=True, kw_only=True):
    """Printed by `explain`."""

    kind: str = "explain"  #: kind of the document
    sandbox: str  #: sandbox id
    lines: tuple[str, ...]  #: text for people: section titles, and indented lines below them


# The history document: what changed of each sandbox, when and why.


class Change(Struct, frozen=True):
    """One change of a sandbox."""

    time: str  #: end of the pass that made or found the change
    age_s: float  #: age of the change
    sandbox: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    state: ChangeState  #: `gone`: sandbox ended
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
    BOUND = "bound"
    UNBOUND = "unbound"


class NodeEvent(Struct, frozen=True):
    """Something that happened to the node as a whole."""

    time: str  #: when
    age_s: float  #: age of the event
    #: `plugin-conflict`: with another NRI plugin; `exclusive-conflict`: a pCPU is exclusive to
    #: several sandboxes, or to a container of another allocator too; `foreign-tasks`: on exclusive
    #: pCPUs; `quiet-changed`: other pCPUs are kept quiet; `quiet-writer`: something else writes
    #: what keeps them quiet; `quiet-failed`: it cannot be written; `memory-moving`: to the NUMA
    #: nodes of a sandbox's vCPUs; `memory-moved`: all that was far from them; `memory-stays`: some
    #: of it does, and why; `bound`: vCPUs, to pCPUs named by hand; `unbound`: that ended, and why
    kind: NodeEventKind
    text: str  #: what happened, as logged


class HistoryDocument(Document, frozen=True, kw_only=True):
    """Printed by `history`."""

    kind: str = "history"  #: kind of the document
    time: str  #: when it was made
    changes: tuple[Change, ...]  #: one object per change, newest last
    #: of the node, newest last; with a sandbox named, those that name it
    events: tuple[NodeEvent, ...]


# The map document: which pCPU is which vCPU and which guest CPU.


class MapSandbox(Struct, frozen=True):
    """The map of one sandbox."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    state: str  #: as in `state`
    guest: Guest | None  #: the map to guest CPUs; null: no VMM


class MapDocument(Document, frozen=True, kw_only=True):
    """Printed by `map`."""

    kind: str = "map"  #: kind of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon made it
    sandboxes: tuple[MapSandbox, ...]  #: one object per sandbox


# The metrics document: the daemon's metrics as Prometheus reads them.


class MetricsDocument(Document, frozen=True, kw_only=True):
    """Printed by `metrics`."""

    kind: str = "metrics"  #: kind of the document
    address: str  #: where they were read: `unix:` and a path, or a URL
    text: str  #: the metrics in Prometheus' text format


# The names of the sandboxes: what a command needs to know which one is meant.


class SandboxName(Struct, frozen=True):
    """A sandbox's id and its pod."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known


class Names(Document, frozen=True, kw_only=True):
    """The daemon's answer to `names`; no command prints it."""

    kind: str = "names"  #: kind of the document
    sandboxes: tuple[SandboxName, ...]  #: one object per sandbox


# Small documents of commands that write files or settings, and errors.


class PolicyDocument(Document, frozen=True, kw_only=True):
    """Printed by `policy set`, `policy unset` and `policy get`."""

    overrides: dict[str, str]  #: the class of each pod, by `namespace/name` or sandbox id
    kind: str = "policy"


class ConfigDocument(Document, frozen=True, kw_only=True):
    """Printed by `config show`."""

    settings: dict[str, Any]  #: every setting as in a file; cpu lists and words are text
    running: bool  #: true: as the daemon has them; false: as the file has them
    refused: RefusedReload | None  #: the daemon's newest reload, if it was refused
    kind: str = "config"


class ConfigProblem(Struct, frozen=True):
    """One error of a configuration file."""

    key: str  #: the setting; an entry of a list by its number; empty: the file as a whole
    line: int | None  #: its line; null: it has none
    error: str  #: what is wrong, and what is allowed
    hint: str = ""  #: what may help


class ConfigCheckDocument(Document, frozen=True, kw_only=True):
    """Printed by `config check`; a file that cannot be read is an `error`."""

    file: str  #: the file that was read
    ok: bool  #: false: the exit status is 78
    problems: tuple[ConfigProblem, ...]  #: one object per error
    kind: str = "config-check"


class FileChange(Struct, frozen=True):
    """What happened to one file."""

    #: what was done; `would write`: nothing yet, `kata-class` without --write
    verb: Literal["wrote", "removed", "unchanged", "kept", "would write"]
    path: str  #: its path on the node
    reason: str = ""  #: why it was kept


class FilesDocument(Struct, frozen=True):
    """Printed by `install`, `uninstall` and `kata-class`."""

    kind: Literal["install", "uninstall", "kata-class"]  #: the command
    changes: tuple[FileChange, ...]  #: one object per file
    remarks: tuple[str, ...]  #: what is left to do
    version: int = VERSION


class ErrorDocument(Document, frozen=True, kw_only=True):
    """Printed instead of another document when a command fails; the same is on stderr."""

    kind: str = "error"  #: kind of the document
    error: str  #: what failed
    hint: str  #: what may help
    exit_status: int  #: the command's exit status
