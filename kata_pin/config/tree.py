"""Every setting of kata-pin, once: the frozen Config tree is also the table of settings.

A field made by `setting` is one row: its name is the last part of the key, and its kind, default,
unit, help and example are here and nowhere else. table.py lists the rows; the parser, the sample
file and the man page are made from that list. Read once; a reload makes a new tree.
"""

# ruff: noqa: RUF009 - setting() makes a dataclass field, it is not a default shared by instances

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from kata_pin.config.alloc import Alloc
from kata_pin.config.guest import Guest
from kata_pin.config.kinds import (
    BOOLEAN,
    CPUS,
    NAME,
    OVERHEAD,
    PATH,
    PLUGIN_INDEX,
    choice,
    integer,
    listing,
    mapping,
    number,
)
from kata_pin.config.metrics import Metrics
from kata_pin.config.row import setting
from kata_pin.errors import ConfigError
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.settings import (
    ExclusiveMode,
    Overhead,
    OverheadKind,
    PlacementSettings,
    VcpuMode,
)
from kata_pin.model.thread import ThreadRole


class Mode(StrEnum):
    """Whether affinities are set or only compared."""

    ACT = "act"
    OBSERVE = "observe"


class ContainerLeaves(StrEnum):
    """When a container stops counting in the sandbox mask (DESIGN D8)."""

    RUNNING = "running"
    KATA = "kata"


class NewThreads(StrEnum):
    """How new threads are noticed."""

    AUTO = "auto"
    EVENTS = "events"
    AUDIT = "audit"


class Changes(StrEnum):
    """How changed cpusets and CPUs are noticed."""

    EVENTS = "events"
    AUDIT = "audit"


class NriEnabled(StrEnum):
    """Whether containerd or CRI-O is asked to tell of its containers."""

    AUTO = "auto"
    YES = "yes"
    NO = "no"


class Intruders(StrEnum):
    """What `check` makes of a foreign thread allowed on an exclusive pCPU."""

    REPORT = "report"
    FAIL = "fail"


class LogLevel(StrEnum):
    """Least level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


BUNDLE_ROOTS: Final = (
    "/run/containerd",
    "/run/k3s/containerd",
    "/run/docker/containerd",
    "/run/containers/storage",
)
"""Where OCI bundles lie by default (DESIGN D4)."""

KATA_CONFIGS: Final = (
    "/etc/kata-containers",
    "/opt/kata/share/defaults/kata-containers",
    "/usr/share/defaults/kata-containers",
    "/usr/share/kata-containers/defaults",
)
"""Where Kata's configuration files lie by default, the administrator's first."""


@dataclass(frozen=True)
class Paths:
    """Where things lie on this node."""

    vc: str = setting(PATH, "/run/vc", "state of Kata's Go runtime: persist.json, pid files, QMP")
    kata: str = setting(PATH, "/run/kata", "state of Kata's Rust runtime: state.json")
    debugfs: str = setting(
        PATH,
        "/sys/kernel/debug",
        "where debugfs is mounted; KVM names its vCPU threads there",
    )
    bundle_roots: tuple[str, ...] = setting(
        listing(PATH),
        BUNDLE_ROOTS,
        "folders that OCI bundles may lie in; a bundle outside all of them is recorded without "
        "a cpuset",
        example="[/run/containerd, /data/containerd]",
    )
    kubelet_state: str = setting(
        PATH,
        "/var/lib/kubelet/cpu_manager_state",
        "the checkpoint of the kubelet's CPU manager",
    )
    kata_configs: tuple[str, ...] = setting(
        listing(PATH),
        KATA_CONFIGS,
        "folders of Kata's configuration files; the hypervisor paths in them are accepted as VMMs",
    )


@dataclass(frozen=True)
class Audit:
    """How often everything is looked at without a reason."""

    affinity_s: float = setting(
        number(0.1, 3600), 10.0, "time between audits of affinities", unit="seconds"
    )
    deep_s: float = setting(
        number(0.1, 86400),
        60.0,
        "time between deep audits, which also find sandboxes, threads and containers anew",
        unit="seconds",
    )


@dataclass(frozen=True)
class Hook:
    """What the OCI hook may spend; written into the hook's arguments by install."""

    record_ms: int = setting(
        integer(1, 10000),
        250,
        "longest wait of a hook for the record; after it the message goes to the spool",
        unit="milliseconds",
    )
    pin_ms: int = setting(
        integer(0, 10000),
        200,
        "longest wait of createRuntime and prestart for the pins; 0 does not wait",
        unit="milliseconds",
    )
    strict: bool = setting(
        BOOLEAN,
        default=False,
        help_text="fail the container when it could not be recorded or pinned; works only in "
        "prestart and createRuntime of Kata's Go runtime",
    )


@dataclass(frozen=True)
class Qmp:
    """When QEMU is asked, and for how long."""

    enabled: bool = setting(
        BOOLEAN,
        default=True,
        help_text="ask QEMU: the extra monitor at any time, the main socket only while Kata has "
        "let go of it",
    )
    greeting_ms: int = setting(
        integer(1, 1000), 50, "longest wait for the greeting", unit="milliseconds"
    )
    session_ms: int = setting(
        integer(1, 5000), 120, "longest time on the socket in all", unit="milliseconds"
    )


@dataclass(frozen=True)
class Nri:
    """The NRI plugin, which observes: it tells of updates, which no hook does."""

    enabled: NriEnabled = setting(
        choice(NriEnabled),
        NriEnabled.AUTO,
        "whether to be an NRI plugin. auto: whenever the socket is there; yes: the same, and warn "
        "while it is not; no: never",
    )
    socket: str = setting(PATH, "/var/run/nri/nri.sock", "where containerd or CRI-O takes plugins")
    index: str = setting(
        PLUGIN_INDEX,
        "95",
        "place among the node's plugins; behind those that decide cpusets, to be told the result",
    )
    name: str = setting(NAME, "kata-pin", "name among the node's plugins")


@dataclass(frozen=True)
class History:
    """What `kata-pin history` can show; kept below runtime_dir, in memory, for one boot."""

    rows: int = setting(
        integer(0, 1_000_000),
        10_000,
        "most changes that are kept, of all sandboxes and of those that are over; the oldest go "
        "first. 0 keeps none",
    )
    sandbox_rows: int = setting(
        integer(1, 100_000), 200, "most changes that are kept of one sandbox"
    )


@dataclass(frozen=True)
class Config:
    """All settings. `Config()` is what holds without a file."""

    mode: Mode = setting(
        choice(Mode), Mode.ACT, "act: set affinities; observe: only compare and report"
    )
    runtime_dir: str = setting(
        PATH, "/run/kata-pin", "sockets, registry and spool; must not be shared between daemons"
    )
    group: str = setting(
        NAME, "kata-pin", "group that may read the state through the status socket"
    )
    log_level: LogLevel = setting(choice(LogLevel), LogLevel.INFO, "least level that is logged")
    hypervisors: tuple[str, ...] = setting(
        listing(PATH),
        (),
        "executables accepted as a VMM beside the well-known ones and those of Kata's "
        "configuration",
        example="[/srv/qemu/bin/qemu-system-x86_64]",
    )
    vcpus: VcpuMode = setting(
        choice(VcpuMode),
        VcpuMode.PAIR,
        "pair: one vCPU on each exclusive pCPU; float: every vCPU on the sandbox mask; leave: "
        "vCPUs are not touched",
    )
    overhead: Overhead = setting(
        OVERHEAD,
        Overhead(),
        "where every other thread and surplus vCPUs go. auto: the sandbox's shared CPUs, else the "
        "kubelet's default set, else the sandbox mask; sandbox: the sandbox mask; housekeeping: "
        "the list of that name; reserve:k: the last k exclusive CPUs of the sandbox; leave: not "
        "touched",
        example="reserve:1",
    )
    overhead_roles: Mapping[ThreadRole, Overhead] = setting(
        mapping(choice(ThreadRole), OVERHEAD),
        MappingProxyType({}),
        "overhead for single roles; vcpu means surplus vCPUs; the shim is left alone unless it is "
        "named here",
        example="{iothread: sandbox, shim: housekeeping}",
    )
    housekeeping: CpuSet = setting(
        CPUS, EMPTY, "pCPUs of the node's own work, for overhead: housekeeping", example="0-1"
    )
    exclusive: ExclusiveMode = setting(
        choice(ExclusiveMode),
        ExclusiveMode.AUTO,
        "whether containers own their CPUs. auto: as the kubelet's checkpoint says, else inferred "
        "from quota and shares; always: a cpuset disjoint from the other containers' is exclusive; "
        "never: none is",
    )
    exclusive_handlers: Mapping[str, ExclusiveMode] = setting(
        mapping(NAME, choice(ExclusiveMode)),
        MappingProxyType({}),
        "exclusive for single runtime handlers",
        example="{kata-rt: always}",
    )
    container_leaves: ContainerLeaves = setting(
        choice(ContainerLeaves),
        ContainerLeaves.RUNNING,
        "running: a container counts in the sandbox mask until it stops; kata: until it is "
        "deleted, as Kata itself counts",
    )
    new_threads: NewThreads = setting(
        choice(NewThreads),
        NewThreads.AUTO,
        "events: the kernel's process events must work; audit: threads are found by the audit "
        "only; auto: events if they work",
    )
    changes: Changes = setting(
        choice(Changes),
        Changes.EVENTS,
        "how changed cpusets are noticed. events: the files of Kata, of the kubelet and of cgroups "
        "are watched, and the kernel tells of CPUs that go on- or offline; audit: the deep audit "
        "finds what changed",
    )
    intruders: Intruders = setting(
        choice(Intruders),
        Intruders.REPORT,
        "what check makes of a foreign thread allowed on an exclusive pCPU: report: a line; fail: "
        "exit status 3",
    )
    paths: Paths = field(default_factory=Paths)
    audit: Audit = field(default_factory=Audit)
    hook: Hook = field(default_factory=Hook)
    qmp: Qmp = field(default_factory=Qmp)
    nri: Nri = field(default_factory=Nri)
    guest: Guest = field(default_factory=Guest)
    history: History = field(default_factory=History)
    alloc: Alloc = field(default_factory=Alloc)
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other, with ConfigError without a file."""
        if self.audit.deep_s < self.audit.affinity_s:
            raise ConfigError("shorter than audit.affinity_s", key="audit.deep_s")
        if self.qmp.session_ms < self.qmp.greeting_ms:
            raise ConfigError("shorter than qmp.greeting_ms", key="qmp.session_ms")
        chosen = {"overhead": self.overhead}
        chosen |= {f"overhead_roles.{role}": o for role, o in self.overhead_roles.items()}
        for key, overhead in chosen.items():
            if overhead.kind is OverheadKind.HOUSEKEEPING and not self.housekeeping:
                raise ConfigError(
                    "housekeeping has no CPUs", key=key, hint="set housekeeping to a cpu list"
                )

    @property
    def acts(self) -> bool:
        """Whether affinities may be set."""
        return self.mode is Mode.ACT

    @property
    def placement(self) -> PlacementSettings:
        """The settings that policy needs."""
        return PlacementSettings(
            vcpus=self.vcpus,
            overhead=self.overhead,
            overhead_roles=self.overhead_roles,
            exclusive=self.exclusive,
            exclusive_handlers=self.exclusive_handlers,
            housekeeping=self.housekeeping,
            stopped_counts=self.container_leaves is ContainerLeaves.KATA,
        )
