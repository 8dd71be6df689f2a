"""Every setting of kata-pin, once: the frozen Config tree is also the table of settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from msgspec import Struct, field

from kata_pin.base.config.alloc import Alloc, Resctrl
from kata_pin.base.config.kinds import (
    NAME,
    OVERHEAD,
    PATH,
    Kind,
    Raw,
    choice,
    expected,
    integer,
    listing,
    mapping,
    matching,
    number,
    setting,
    text_of,
)
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import ConfigError, ParseError
from kata_pin.base.settings import (
    ExclusiveMode,
    MemoryMode,
    Overhead,
    OverheadKind,
    PlacementSettings,
    QuietPods,
    VcpuMode,
    VfioInterrupts,
)
from kata_pin.base.values import Mode, QuietLevel, ThreadRole

# The settings of cpusets inside the guest: the section `guest`.


class Guest(Struct, frozen=True):
    """Cpusets of containers inside the guest, set by the kata-agent."""

    enabled: bool = setting(
        True, "keep each container's processes on the guest CPUs of its own vCPUs"
    )
    act_on_inferred: bool = setting(
        False,
        "also act where a vCPU's guest CPU is only inferred: hotplugged vCPUs of a guest kernel "
        "that no lab run has covered",
    )
    exec: bool = setting(
        False,
        "run cat in a container, as user nobody, to read the guest's CPUs and cpusets; without it, "
        "what was set is not read back",
    )
    connect_ms: int = setting(
        1000, "longest wait for a connection to the agent", integer(1, 60000, "milliseconds")
    )
    call_ms: int = setting(
        2000, "longest wait for an answer of the agent", integer(1, 60000, "milliseconds")
    )


# The settings of metrics: the section `metrics`.
#
# An address that is not a loopback one is refused: metrics name the node's CPUs and, by setting,
# its pods, and the daemon runs as root. Serving is service/assembly.py.

_PLACE: Final = r"(\[[0-9a-fA-F:.]{1,45}\]|[^:\[\]]{1,253}):([0-9]{1,5})"
_LOOPBACK: Final = r"127(\.(0|[1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|25[0-5])){3}"
_WORDS: Final = "none, unix or a loopback address with a port such as 127.0.0.1:9753"


class EndpointKind(StrEnum):
    """Where metrics are served."""

    NONE = "none"
    UNIX = "unix"
    TCP = "tcp"


class Endpoint(Struct, frozen=True):
    """One endpoint; `host` and `port` are those of a TCP one."""

    kind: EndpointKind = EndpointKind.UNIX
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.kind is not EndpointKind.TCP:
            return self.kind.value
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _read(raw: Raw) -> Endpoint:
    text = text_of(raw)
    if text in {EndpointKind.NONE, EndpointKind.UNIX}:
        return Endpoint(EndpointKind(text))
    found = re.fullmatch(_PLACE, text)
    if found is None:
        raise expected(_WORDS, text)
    host, port = found[1], int(found[2])
    if host != "[::1]" and re.fullmatch(_LOOPBACK, host) is None:
        raise ParseError("not a loopback address (127.0.0.1 or [::1])", text=host)
    if not 1 <= port <= 65535:
        raise ParseError("not a port from 1 to 65535", text=found[2])
    return Endpoint(EndpointKind.TCP, host.strip("[]"), port)


ENDPOINT: Final = Kind(_WORDS, _read, str)


class Metrics(Struct, frozen=True):
    """Where Prometheus metrics are served, and how detailed they are."""

    listen: Endpoint = setting(
        Endpoint(),
        "where /metrics is served. unix: metrics.sock in runtime_dir, readable by the same group "
        "as the state; a loopback port: readable by every local process; none: nowhere",
        ENDPOINT,
        example="127.0.0.1:9753",
    )
    sandboxes: int = setting(
        0,
        "most sandboxes that get a time series of their own, which names their pods; 0: none",
        integer(0, 1000),
    )


# The settings that say where things are on a node.

BUNDLE_ROOTS: Final = (
    "/run/containerd",
    "/run/k3s/containerd",
    "/run/docker/containerd",
    "/run/containers/storage",
)
"""Where OCI bundles are by default (D4)."""

KATA_CONFIGS: Final = (
    "/etc/kata-containers",
    "/opt/kata/share/defaults/kata-containers",
    "/usr/share/defaults/kata-containers",
    "/usr/share/kata-containers/defaults",
)
"""Where Kata's configuration files are by default, the administrator's first."""


class Paths(Struct, frozen=True):
    """Where things are on this node."""

    vc: str = setting("/run/vc", "state of Kata's Go runtime: persist.json, pid files, QMP", PATH)
    kata: str = setting("/run/kata", "state of Kata's Rust runtime: state.json", PATH)
    debugfs: str = setting(
        "/sys/kernel/debug", "debugfs mount point; KVM names its vCPU threads there", PATH
    )
    bundle_roots: tuple[str, ...] = setting(
        BUNDLE_ROOTS,
        "folders that may hold OCI bundles; a container whose bundle is elsewhere is recorded "
        "without a cpuset",
        listing(PATH),
        example="[/run/containerd, /data/containerd]",
    )
    kubelet_state: str = setting(
        "/var/lib/kubelet/cpu_manager_state", "checkpoint of the kubelet's CPU manager", PATH
    )
    cdi: str = setting(
        "/run/cdi", "folder of CDI specs, in which the DRA driver for CPUs names its claims", PATH
    )
    kata_configs: tuple[str, ...] = setting(
        KATA_CONFIGS,
        "folders of Kata's configuration files; the hypervisors they name are accepted as VMMs",
        listing(PATH),
    )


# The settings of scheduling classes: the section `rt`.

NO_CLASS: Final = "none"


class Rt(Struct, frozen=True):
    """Real-time scheduling of vCPUs, for guests that never wait; off by default."""

    vcpus: str = setting(
        NO_CLASS,
        "scheduling class of paired vCPUs. fifo:PRIORITY: SCHED_FIFO, unless something else "
        "that must run on the pCPU could starve; then the vCPU keeps its class, and show says "
        "why. "
        "The service needs more rights for it, which `kata-pin install` gives",
        matching(r"none|fifo:([1-9]|[1-4][0-9])", "none, or fifo: and a priority from 1 to 49"),
        example="fifo:1",
    )

    @property
    def priority(self) -> int:
        """The priority of vCPUs; 0: they keep their class."""
        return 0 if self.vcpus == NO_CLASS else int(self.vcpus.partition(":")[2])


# A field made by `setting` is one row: its name is the last part of the key, and its kind, default,
# unit, help and example are here and nowhere else. table.py lists the rows; the parser, the sample
# file and the man page are made from that list.


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


class Audit(Struct, frozen=True):
    """How often everything is checked without an event."""

    affinity_s: float = setting(
        10.0, "time between audits of affinities", number(0.1, 3600, "seconds")
    )
    deep_s: float = setting(
        60.0,
        "time between deep audits, which also search for sandboxes, threads and containers",
        number(0.1, 86400, "seconds"),
    )


class Hook(Struct, frozen=True):
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


class Qmp(Struct, frozen=True):
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


class Nri(Struct, frozen=True):
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


class History(Struct, frozen=True):
    """What `kata-pin history` can show; kept below runtime_dir, in memory, until a reboot."""

    rows: int = setting(
        10_000,
        "most changes kept, of all sandboxes including those that ended; the oldest are removed "
        "first. 0: keep none",
        integer(0, 1_000_000),
    )
    sandbox_rows: int = setting(200, "most changes kept per sandbox", integer(1, 100_000))


class Isolation(Struct, frozen=True):
    """Measuring who runs on exclusive pCPUs."""

    check_s: float = setting(
        2.0, "how long check measures; 0: not at all", number(0, 3600, "seconds")
    )
    watch: bool = setting(
        True,
        "after each audit, check whether other tasks ran on exclusive pCPUs; where they ran "
        "too long, record for a second which ones",
    )
    max_foreign: float = setting(
        0.1,
        "share of an exclusive pCPU's time that user processes and other sandboxes may have before "
        "check fails and the watch reports them",
        number(0, 100, "percent"),
    )


class Config(Struct, frozen=True):
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
        "what is kept off exclusive pCPUs in addition to other tasks. off: nothing; report: "
        "nothing, but show what disturbs them; irq: interrupts of devices that can be moved; "
        "full: also the kernel's own work. irq and full need rights: run `kata-pin install` "
        "again",
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
        "state. 0: kata-pin sets no limit",
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
        "what happens to sandboxes' memory on other NUMA nodes than their vCPUs. report: "
        "show it; migrate: move pages to the vCPUs' nodes once these are on exclusive pCPUs",
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
    added: Mapping[str, Struct] = field(default_factory=dict)
    """Sections of options of other packages (base/config/options.py), by their names."""

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


# The configuration in force, for everything that must follow a reload.


@dataclass
class LiveConfig:
    """The configuration in force; read `now` at each use, since a reload replaces it."""

    now: Config
    _stopped: bool = False

    @property
    def acts(self) -> bool:
        """Whether pins may be set now."""
        return self.now.acts and not self._stopped

    def replace(self, config: Config) -> None:
        """Put another configuration in force."""
        self.now = config

    def stop_acting(self) -> None:
        """Set nothing more until the daemon is restarted: it is being uninstalled."""
        self._stopped = True
