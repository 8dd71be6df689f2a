"""What the administrator chooses for placement and allocation; config/ makes these values.

Apart from the rest of the model, so that reading the configuration loads little else.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final

from msgspec import Struct, field

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.values import CpuClass, ThreadRole


class VcpuMode(StrEnum):
    """How vCPU threads are placed (D10)."""

    PAIR = "pair"
    FLOAT = "float"
    LEAVE = "leave"


class ExclusiveMode(StrEnum):
    """What the administrator says about exclusive cpusets (D9)."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class OverheadKind(StrEnum):
    """Where threads that are not vCPUs go (D11). LEAVE: they are not touched."""

    AUTO = "auto"
    SANDBOX = "sandbox"
    HOUSEKEEPING = "housekeeping"
    RESERVE = "reserve"
    CPUS = "cpus"
    LEAVE = "leave"


class Overhead(Struct, frozen=True):
    """One overhead setting: `reserve` carries k, `cpus` the list."""

    kind: OverheadKind = OverheadKind.AUTO
    reserve: int = 0
    cpus: CpuSet = EMPTY

    def __str__(self) -> str:
        if self.kind is OverheadKind.RESERVE:
            return f"reserve:{self.reserve}"
        return str(self.cpus) if self.kind is OverheadKind.CPUS else self.kind.value


class MemoryMode(StrEnum):
    """What is done about memory on other NUMA nodes than a sandbox's vCPUs."""

    REPORT = "report"
    MIGRATE = "migrate"


REMOTE_PERCENT: Final = 10.0
"""Share of remote memory from which on it is worth a warning and a move: each such access takes up
to twice as long."""


class QuietPods(StrEnum):
    """Whose exclusive pCPUs are kept quiet: every pod's, or only those of pods that ask for it."""

    ALL = "all"
    ANNOTATED = "annotated"


class VfioInterrupts(StrEnum):
    """Where interrupts of devices that VFIO gave to a pod go: its own pCPUs too, or not."""

    OWN = "own"
    HOUSEKEEPING = "housekeeping"


class PlacementSettings(Struct, frozen=True):
    """The settings that placement depends on (config/ has the table).

    `overhead_roles` overrides `overhead` for a role. `exclusive_handlers` overrides `exclusive`
    for a runtime handler. `stopped_counts` is the setting `kata` of D8: a container counts
    until it is deleted.
    """

    vcpus: VcpuMode = VcpuMode.PAIR
    overhead: Overhead = field(default_factory=Overhead)
    overhead_roles: Mapping[ThreadRole, Overhead] = field(default_factory=dict)
    exclusive: ExclusiveMode = ExclusiveMode.AUTO
    exclusive_handlers: Mapping[str, ExclusiveMode] = field(default_factory=dict)
    housekeeping: CpuSet = EMPTY
    stopped_counts: bool = False


class Eligibility(StrEnum):
    """Who can have CPUs of its own; all need a whole number of CPUs.

    KUBELET: containers of Guaranteed pods. RELAXED (Crane): a container whose CPU limit equals its
    CPU request, whatever the other containers of its pod have.
    """

    KUBELET = "kubelet"
    RELAXED = "relaxed"


class ManagerPolicy(StrEnum):
    """The policies of the kubelet's topology manager, with CPUs as its only resource."""

    NONE = "none"
    BEST_EFFORT = "best-effort"
    RESTRICTED = "restricted"
    SINGLE_NUMA_NODE = "single-numa-node"


class PodPattern(Struct, frozen=True):
    """Pods by namespace and runtime handler; the patterns know `*` and `?` (shell style)."""

    namespace: str = "*"
    handler: str = "*"

    def matches(self, namespace: str, handler: str) -> bool:
        """Return whether a pod of this namespace and runtime handler is meant."""
        return fnmatchcase(namespace, self.namespace) and fnmatchcase(handler, self.handler)


class AllowRule(PodPattern, frozen=True):
    """Pods that may choose by annotation: CPU classes, RDT classes and block-I/O classes."""

    classes: frozenset[CpuClass] = frozenset({CpuClass.SHARE, CpuClass.EXCLUSIVE})
    rdt: frozenset[str] = frozenset()
    blockio: frozenset[str] = frozenset()

    def allows(self, namespace: str, handler: str, cpu_class: CpuClass) -> bool:
        """Return whether a pod of this namespace and runtime handler may choose this class."""
        return cpu_class in self.classes and self.matches(namespace, handler)


class AssignRule(PodPattern, frozen=True):
    """Pods whose containers get these classes when they are created; empty: none."""

    rdt: str = ""
    blockio: str = ""


class ClassRule(PodPattern, frozen=True, kw_only=True):
    """Sandboxes that get a class of resctrl."""

    class_name: str
