"""The check document: what is not as it should be, and the kinds of findings with their words."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from kata_pin.base.documents.document import Cpus, Daemon, Document
from kata_pin.base.documents.measured import HostProcess, RanTask
from kata_pin.base.values import CheckVerdict


class IntruderGroup(Struct, frozen=True):
    """Processes of one owner that may run on others' exclusive pCPUs.

    How much CPU time they used there is known only for the time of the measurement.
    """

    name: str  #: pod, `kata-pin itself`, systemd unit or cgroup
    unit: str  #: systemd unit; empty: none
    cgroup: str  #: cgroup of the first process
    sandbox: str  #: id of their sandbox; empty: none
    cpus: Cpus  #: exclusive pCPUs of others that they may run on
    threads: int  #: number of threads that may run there
    measured_ms: float  #: how long they ran there while that was measured
    last_there: int  #: number of these threads that ran there last
    there_s: float  #: CPU time of those that ran there last, used there or elsewhere
    cpu_s: float  #: CPU time of all these processes
    processes: tuple[HostProcess, ...]  #: the processes; those that used most time there first
    remedy: str  #: what would keep them off
    command: str  #: a command that does; empty: there is none


class Foreign(Struct, frozen=True):
    """What ran on an exclusive pCPU of another owner."""

    cpu: int  #: the pCPU
    percent: float  #: share of its time
    tasks: tuple[RanTask, ...]  #: the tasks, longest first; empty: the method does not name them
    seen_s: float | None = None  #: age, where the daemon's watch saw it; null: measured now


class Measurement(Struct, frozen=True):
    """How the exclusive pCPUs were measured."""

    cpus: Cpus  #: the pCPUs
    seconds: float  #: how long
    method: Literal["perf", "hist", "schedstat", "wait", "watch"]  #: `watch`: the daemon's counters
    max_foreign_percent: float  #: share of a pCPU's time that others may have


class FindingRow(Struct, frozen=True):
    """A kind of finding, with its words.

    An option of another package has kinds of its own, each named `OPTION:KIND`. `counted` is what
    `kata_pin_violations` counts of it; empty: nothing. `fails` and `remedy` are those of its
    findings, unless one says otherwise. `nouns` are one and many in the verdict of `check`; empty:
    the kind, as for those of other packages.
    """

    kind: str
    about: str
    fails: bool
    counted: str = ""
    remedy: str = ""
    nouns: tuple[str, str] = ("", "")

    def found(
        self,
        sandbox: str,
        cpus: str,
        text: str,
        *,
        fails: bool | None = None,
        remedy: str | None = None,
        group: IntruderGroup | None = None,
        foreign: Foreign | None = None,
        owner: str = "",
        who: str = "",
        since_s: float | None = None,
        command: str = "",
    ) -> Finding:
        """Return a finding of this kind, about a sandbox (its id, or empty) and pCPUs."""
        return Finding(
            self.kind,
            self.fails if fails is None else fails,
            sandbox,
            cpus,
            text,
            group=group,
            foreign=foreign,
            owner=owner,
            who=who,
            since_s=since_s,
            remedy=self.remedy if remedy is None else remedy,
            command=command,
        )


DRIFT: Final = FindingRow(
    "drift",
    "a thread's affinity is not the expected one",
    fails=True,
    counted="threads",
    remedy="set the affinities again, as the daemon does in each audit",
    nouns=("drifting thread", "drifting threads"),
)
FOREIGN: Final = FindingRow(
    "foreign",
    "others ran on an exclusive pCPU",
    fails=True,
    counted="exclusive pCPUs with a lasting episode (only with `isolation.watch`)",
    nouns=("exclusive pCPU that others ran on", "exclusive pCPUs that others ran on"),
)
CONFLICT: Final = FindingRow(
    "conflict",
    "an exclusive pCPU of a sandbox is in the mask of another, or its threads run on one",
    fails=True,
    counted="pCPUs that are exclusive to two sandboxes",
    nouns=("conflict", "conflicts"),
)
INTRUDER: Final = FindingRow(
    "intruder",
    "others may run on an exclusive pCPU",
    fails=False,
    counted="processes whose main thread may",
    nouns=("host process", "host processes"),
)
NO_VMM: Final = FindingRow(
    "no-vmm",
    "no VMM of the sandbox was found",
    fails=False,
    counted="sandboxes",
    nouns=("sandbox without VMM", "sandboxes without VMM"),
)
UNPINNED: Final = FindingRow(
    "unpinned",
    "no container of the sandbox has a cpuset",
    fails=False,
    counted="sandboxes",
    nouns=("unpinned sandbox", "unpinned sandboxes"),
)
ORPHAN: Final = FindingRow(
    "orphan",
    "a VMM has outlived its shim",
    fails=True,
    counted="sandboxes",
    remedy="end the VMM once its pod is gone: nothing of Kata's will",
    nouns=("VMM without its shim", "VMMs without their shims"),
)
OTHER_WRITER: Final = FindingRow(
    "other-writer",
    "the VMM or another process changes affinities",
    fails=True,
    counted="sandboxes where kata-pin backs off",
    nouns=("sandbox with another writer", "sandboxes with another writer"),
)
WARNING: Final = FindingRow(
    "warning", "a pass over the sandbox warns", fails=False, nouns=("warning", "warnings")
)

FINDINGS: Final = (
    *(DRIFT, FOREIGN, CONFLICT, INTRUDER, OTHER_WRITER, ORPHAN, NO_VMM, UNPINNED, WARNING),
)
"""Every kind of the core and of our options, worst first."""

_ADDED: Final = "[a-z][a-z0-9_-]*:[a-z][a-z0-9-]*"

FindingKind = Annotated[
    str,
    Meta(
        pattern=f"^({'|'.join(row.kind for row in FINDINGS)}|{_ADDED})$",
        examples=[row.kind for row in FINDINGS],
        description="; ".join(f"`{row.kind}`: {row.about}" for row in FINDINGS)
        + "; `OPTION:KIND`: of an option of another package",
    ),
]
"""What a finding of `check` is about."""


class Finding(Struct, frozen=True):
    """Something that is not as it should be."""

    kind: FindingKind
    fails: bool  #: whether it makes `ok` false
    sandbox: str  #: id of the sandbox; empty: not about a sandbox
    cpus: Cpus  #: the pCPUs concerned
    text: str  #: the finding in words
    group: IntruderGroup | None = None  #: the intruders; null: another kind of finding
    foreign: Foreign | None = None  #: who ran there; null: another kind of finding
    owner: str = ""  #: pods that the pCPUs belong to, or that the finding is about; empty: none
    who: str = ""  #: what is at fault there: a thread, a process, another pod
    since_s: float | None = None  #: for how long it has been so; null: not known
    remedy: str = ""  #: what would end it; empty: `text` says it, or nothing is known
    command: str = ""  #: a command that does; empty: there is none


class CheckDocument(Document, frozen=True, kw_only=True):
    """Printed by `check`."""

    kind: str = "check"  #: kind of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon made it
    #: `findings`: some fail (exit status 3); `unknown`: could not tell (exit status 4)
    verdict: CheckVerdict
    ok: bool  #: whether the verdict is `ok`
    unknown: tuple[str, ...]  #: what could not be checked, and why; also beside findings
    sandboxes: int  #: number of sandboxes checked
    threads: int  #: number of threads checked
    findings: tuple[Finding, ...]  #: what was found
    free: Cpus  #: pCPUs that no container has exclusively
    measured: Measurement | None = None  #: how; null: nothing is exclusive, or it was not measured


class Findings(Document, frozen=True, kw_only=True):
    """The daemon's answer to `findings`: those that options bring; no command prints it."""

    kind: str = "findings"  #: kind of the document
    findings: tuple[Finding, ...]  #: what was found
