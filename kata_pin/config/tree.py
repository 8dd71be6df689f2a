"""Every setting of kata-pin, once: the frozen Config tree is also the table of settings.

A field made by `setting` is one row: its name is the last part of the key, and its kind, default,
unit, help and example are here and nowhere else. table.py lists the rows; the parser, the sample
file and the man page are made from that list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from kata_pin.config.alloc import Alloc
from kata_pin.config.guest import Guest
from kata_pin.config.kinds import (
    NAME,
    OVERHEAD,
    PATH,
    choice,
    integer,
    listing,
    mapping,
    matching,
    number,
    setting,
)
from kata_pin.config.metrics import Metrics
from kata_pin.config.paths import Paths
from kata_pin.config.resctrl import Resctrl
from kata_pin.config.rt import Rt
from kata_pin.errors import ConfigError
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.settings import (
    ExclusiveMode,
    MemoryMode,
    Overhead,
    OverheadKind,
    PlacementSettings,
    QuietLevel,
    QuietPods,
    VcpuMode,
    VfioInterrupts,
)
from kata_pin.model.thread import ThreadRole


class Mode(StrEnum):
    """Whether affinities are set or only compared."""

    ACT = "act"
    OBSERVE = "observe"


class ContainerLeaves(StrEnum):
    """When a container stops counting in the sandbox mask (D8)."""

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
    """Whether to connect to containerd or CRI-O as an NRI plugin."""

    AUTO = "auto"
    YES = "yes"
    NO = "no"


class Intruders(StrEnum):
    """What `check` does about a host thread that may run on an exclusive pCPU."""

    REPORT = "report"
    FAIL = "fail"


class LogLevel(StrEnum):
    """The lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Audit:
    """How often everything is checked without an event."""

    affinity_s: float = setting(
        10.0, "time between audits of affinities", number(0.1, 3600, "seconds")
    )
    deep_s: float = setting(
        60.0,
        "time between deep audits, which also search for sandboxes, threads and containers",
        number(0.1, 86400, "seconds"),
    )


@dataclass(frozen=True)
class Hook:
    """Limits of the OCI hook; `kata-pin install` writes them into the hook's arguments."""

    record_ms: int = setting(
        250,
        "longest time a hook waits until its container is recorded; after that it writes the "
        "message to the spool",
        integer(1, 10000, "milliseconds"),
    )
    pin_ms: int = setting(
        200,
        "longest time createRuntime and prestart wait for the pins; 0: do not wait",
        integer(0, 10000, "milliseconds"),
    )
    strict: bool = setting(
        False,
        "fail the container if it could not be recorded or pinned; works only in prestart and "
        "createRuntime of Kata's Go runtime",
    )


@dataclass(frozen=True)
class Qmp:
    """When QEMU is queried over QMP, and for how long."""

    enabled: bool = setting(
        True,
        "query QEMU: its extra monitor socket at any time, the main socket only while Kata does "
        "not hold it",
    )
    greeting_ms: int = setting(
        50, "longest wait for QEMU's greeting", integer(1, 1000, "milliseconds")
    )
    session_ms: int = setting(
        120, "longest total time on the socket", integer(1, 5000, "milliseconds")
    )


@dataclass(frozen=True)
class Nri:
    """The NRI plugin: reports container updates, for which no hook runs."""

    enabled: NriEnabled = setting(
        NriEnabled.AUTO,
        "auto: connect whenever the socket exists; yes: the same, and warn while it does not; no: "
        "never connect",
    )
    socket: str = setting("/var/run/nri/nri.sock", "NRI socket of containerd or CRI-O", PATH)
    index: str = setting(
        "95",
        "position among the node's plugins; after those that set cpusets, to see their result",
        matching("[0-9]{2}", "two digits"),
    )
    name: str = setting("kata-pin", "plugin name", NAME)


@dataclass(frozen=True)
class History:
    """What `kata-pin history` can show; kept below runtime_dir, in memory, until a reboot."""

    rows: int = setting(
        10_000,
        "most changes kept, of all sandboxes including those that ended; the oldest are removed "
        "first. 0: keep none",
        integer(0, 1_000_000),
    )
    sandbox_rows: int = setting(200, "most changes kept per sandbox", integer(1, 100_000))


@dataclass(frozen=True)
class Isolation:
    """Measuring who runs on exclusive pCPUs."""

    check_s: float = setting(
        2.0, "how long check measures; 0: not at all", number(0, 3600, "seconds")
    )
    watch: bool = setting(
        True,
        "after each audit look whether other tasks ran on exclusive pCPUs, and record which for a "
        "second where they ran too long",
    )
    max_foreign: float = setting(
        0.1,
        "share of an exclusive pCPU's time that user processes and other sandboxes may have before "
        "check fails and the watch reports them",
        number(0, 100, "percent"),
    )


@dataclass(frozen=True)
class Config:
    """All settings. `Config()` is what applies without a file."""

    mode: Mode = setting(Mode.ACT, "act: set affinities; observe: only compare and report")
    runtime_dir: str = setting(
        "/run/kata-pin", "sockets, registry and spool; two daemons must not share it", PATH
    )
    user: str = setting(
        "kata-pin", "unprivileged user that the daemon becomes once its broker runs", NAME
    )
    group: str = setting(
        "kata-pin", "group that may read the state through the status socket", NAME
    )
    log_level: LogLevel = setting(LogLevel.INFO, "lowest level that is logged")
    hypervisors: tuple[str, ...] = setting(
        (),
        "executables accepted as a VMM in addition to the well-known ones and those of Kata's "
        "configuration",
        listing(PATH),
        example="[/srv/qemu/bin/qemu-system-x86_64]",
    )
    shims: tuple[str, ...] = setting(
        (),
        "executables accepted as Kata's shim in addition to containerd-shim-kata* in /usr/bin, "
        "/usr/local/bin, /usr/libexec, /opt/kata/bin and /opt/kata/runtime-rs/bin",
        listing(PATH),
        example="[/srv/kata/bin/containerd-shim-kata-v2]",
    )
    vcpus: VcpuMode = setting(
        VcpuMode.PAIR,
        "pair: one vCPU on each exclusive pCPU; float: every vCPU on the sandbox mask; leave: do "
        "not touch vCPUs",
    )
    overhead: Overhead = setting(
        Overhead(),
        "where all other threads and unpaired vCPUs run. auto: the sandbox's shared CPUs, else the "
        "kubelet's default set, else the sandbox mask; sandbox: the sandbox mask; housekeeping: "
        "the list of that name; reserve:k: the last k exclusive CPUs of the sandbox; leave: do not "
        "touch them",
        example="reserve:1",
    )
    overhead_roles: Mapping[ThreadRole, Overhead] = setting(
        MappingProxyType({}),
        "overhead per role; vcpu means unpaired vCPUs; the shim is not touched unless it is named "
        "here, or is the VMM itself (Dragonball), whose threads are emulator threads",
        mapping(choice(ThreadRole), OVERHEAD),
        example="{iothread: sandbox, shim: housekeeping}",
    )
    housekeeping: CpuSet = setting(
        EMPTY, "pCPUs for the node's own work, used by overhead: housekeeping", example="0-1"
    )
    exclusive: ExclusiveMode = setting(
        ExclusiveMode.AUTO,
        "whether a container's CPUs are exclusive. auto: as the kubelet's checkpoint says, else "
        "inferred from quota and shares; always: if no other container has them in its cpuset; "
        "never: none are",
    )
    exclusive_handlers: Mapping[str, ExclusiveMode] = setting(
        MappingProxyType({}),
        "exclusive per runtime handler",
        mapping(NAME, choice(ExclusiveMode)),
        example="{kata-rt: always}",
    )
    container_leaves: ContainerLeaves = setting(
        ContainerLeaves.RUNNING,
        "running: a container counts in the sandbox mask until it stops; kata: until it is "
        "deleted, as in Kata itself",
    )
    new_threads: NewThreads = setting(
        NewThreads.AUTO,
        "how new threads are found. events: by the kernel's process events, which must work; "
        "audit: by the audit only; auto: by events if they work",
    )
    changes: Changes = setting(
        Changes.EVENTS,
        "how changed cpusets are noticed. events: by watching the files of Kata, the kubelet and "
        "cgroups, and the kernel's reports of CPUs that go on- or offline; audit: by the deep "
        "audit only",
    )
    intruders: Intruders = setting(
        Intruders.REPORT,
        "what check does about host threads that may run on an exclusive pCPU. report: list them; "
        "fail: also exit with status 3",
    )
    quiet: QuietLevel = setting(
        QuietLevel.REPORT,
        "what is kept off exclusive pCPUs beside other tasks. off: nothing; report: nothing, but "
        "show what disturbs them; irq: interrupts of devices that can be moved; full: also the "
        "kernel's own work. irq and full need rights: run `kata-pin install` again",
    )
    quiet_pods: QuietPods = setting(
        QuietPods.ALL,
        "whose exclusive pCPUs are kept quiet. all: every pod's; annotated: only those of pods "
        "that ask for it by annotation, if a rule of alloc.allow lets them",
    )
    quiet_vfio: VfioInterrupts = setting(
        VfioInterrupts.OWN,
        "where interrupts of devices that VFIO passes to a pod may go. own: also to the pod's own "
        "pCPUs; housekeeping: only to pCPUs that need not be quiet",
    )
    quiet_idle_us: int = setting(
        20,
        "with quiet: full, the longest time that an exclusive pCPU may take to leave an idle "
        "state. 0: no limit of kata-pin's",
        integer(0, 1_000_000, "microseconds"),
    )
    quiet_governor: str = setting(
        "performance",
        "with quiet: full, the frequency governor of exclusive pCPUs whose frequency no other pCPU "
        "shares. leave: leave it",
        NAME,
    )
    memory: MemoryMode = setting(
        MemoryMode.REPORT,
        "what is done about memory of sandboxes on other NUMA nodes than their vCPUs. report: it "
        "is shown; migrate: once vCPUs are on exclusive pCPUs, pages are moved to their nodes",
    )
    memory_rate_mib: int = setting(
        128,
        "with memory: migrate, most memory that is moved per second",
        integer(1, 16384, "MiB per second"),
    )
    paths: Paths = field(default_factory=Paths)
    audit: Audit = field(default_factory=Audit)
    hook: Hook = field(default_factory=Hook)
    qmp: Qmp = field(default_factory=Qmp)
    nri: Nri = field(default_factory=Nri)
    guest: Guest = field(default_factory=Guest)
    history: History = field(default_factory=History)
    isolation: Isolation = field(default_factory=Isolation)
    alloc: Alloc = field(default_factory=Alloc)
    metrics: Metrics = field(default_factory=Metrics)
    resctrl: Resctrl = field(default_factory=Resctrl)
    rt: Rt = field(default_factory=Rt)

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

        self.resctrl.check()

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
