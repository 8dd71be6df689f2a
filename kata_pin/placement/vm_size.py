"""How many vCPUs the VM of a pod will get, and what helps where these are too few."""

from __future__ import annotations

import math
from collections.abc import Callable
from struct import pack, unpack
from typing import Final

from msgspec import Struct

from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.values import KataRuntime, count

# Kata's Go runtime and runtime-rs count differently, and both changed over the versions; RULES has
# a row for each way. What each row says was compared with the answers of Kata's own functions
# (tests/data/kata-sizing). Arithmetic is in 32-bit floats where Kata's is.

Version = tuple[int, ...]

PERIOD_US: Final = 100_000
"""The CFS period of the kubelet, in microseconds."""

_SHARES_OF_A_CPU: Final = 1024


class Sizing(Struct, frozen=True):
    """What sizes the VMs of one handler: its runtime, and its configuration as Kata reads it.

    `static` is static_sandbox_resource_mgmt. `default_maxvcpus` bounds vCPUs that are added to a
    running VM; 0 for no bound. `version` is Kata's; empty stands for the newest. `template`: VMs
    are copies of a template (runtime-rs), which static sizing does not change.
    """

    runtime: KataRuntime
    static: bool = False
    default_vcpus: float = 1
    overhead_vcpus: float = 0
    default_maxvcpus: int = 0
    version: Version = ()
    template: bool = False


class ContainerCpu(Struct, frozen=True):
    """The CPU limits of a container as the runtime gets them; a quota below 0 is none."""

    quota: int = -1
    period: int = PERIOD_US
    cpus: CpuSet = EMPTY

    @property
    def limited(self) -> bool:
        """Whether Kata counts its quota."""
        return self.quota >= 0 and self.period > 0


class PodCpu(Struct, frozen=True):
    """What Kata is told of a pod: the sandbox's annotations, and its containers as they start.

    containerd writes the annotations (`io.kubernetes.cri.sandbox-cpu-quota` and others) from what
    the kubelet says of the whole pod; CRI-O writes none, which is as if all were 0.
    """

    quota: int = 0
    period: int = 0
    shares: int = 0
    memory: int = 0
    containers: tuple[ContainerCpu, ...] = ()


class VmSize(Struct, frozen=True):
    """vCPUs of a VM at boot, once its containers run, and after an update that changes nothing.

    `updated` is None where Kata fails such an update: it would take away vCPUs of the boot.
    """

    boot: int
    running: int
    updated: int | None


class Rule(Struct, frozen=True):
    """How a runtime sizes VMs since a version: a function, and the same in words."""

    runtime: KataRuntime
    static: bool
    since: Version
    size: Callable[[Sizing, PodCpu], VmSize]
    text: str


def vm_size(sizing: Sizing, pod: PodCpu) -> VmSize:
    """Return the size of the pod's VM."""
    return rule_of(sizing).size(sizing, pod)


def rule_of(sizing: Sizing) -> Rule:
    """Return the newest rule that is not newer than the version, else the oldest.

    VMs of a template have what the file says, as the oldest rule of runtime-rs does.
    """
    rows = [
        rule for rule in RULES if (rule.runtime, rule.static) == (sizing.runtime, sizing.static)
    ]
    fitting = [rule for rule in rows if not sizing.version or rule.since <= sizing.version]
    return fitting[-1] if fitting and not sizing.template else rows[0]


def exclusive_pod(cpus: int, *, quota: bool, annotated: bool = True) -> PodCpu:
    """Return a Guaranteed pod of one container with so many exclusive CPUs, as the kubelet has it.

    `quota`: the container keeps its CPU quota, which Kubernetes 1.33 and later take from exclusive
    containers. `annotated`: the runtime annotates the sandbox's size (containerd, not CRI-O).
    """
    limit = cpus * PERIOD_US if quota else -1
    containers = (ContainerCpu(limit, cpus=CpuSet(range(cpus))),)
    if not annotated:
        return PodCpu(containers=containers)
    return PodCpu(limit, PERIOD_US, cpus * _SHARES_OF_A_CPU, 1 << 30, containers)


def _fixed(vcpus: float) -> VmSize:
    count = math.ceil(vcpus)
    return VmSize(count, count, count)


def _quota_vcpus(quota: int, period: int) -> float:
    return _single(quota / period) if quota >= 0 and period > 0 else 0.0


def _by_quota(sizing: Sizing, pod: PodCpu) -> VmSize:
    workload = _quota_vcpus(pod.quota, pod.period)
    return _fixed(_single(_single(sizing.default_vcpus) + workload))


def _go_by_quota_or_shares(sizing: Sizing, pod: PodCpu) -> VmSize:
    if pod.quota >= 0 or not pod.shares:
        return _by_quota(sizing, pod)
    workload = math.ceil(pod.shares / _SHARES_OF_A_CPU)
    return _fixed(_single(_single(sizing.default_vcpus) + workload))


def _go_by_containers(sizing: Sizing, pod: PodCpu) -> VmSize:
    default = _single(sizing.default_vcpus)
    workload = 0.0
    for container in pod.containers:
        workload = _single(workload + _quota_vcpus(container.quota, container.period))
    if not workload:
        workload = sum(len(container.cpus) for container in pod.containers)
    boot = math.ceil(default)
    running = max(boot, _bounded(sizing, math.ceil(_single(default + workload))))
    return VmSize(boot, running, running)


def _rust_as_configured(sizing: Sizing, _pod: PodCpu) -> VmSize:
    return _fixed(_single(sizing.default_vcpus))


def _rust_overhead_and_quota(sizing: Sizing, pod: PodCpu) -> VmSize:
    workload = _quota_vcpus(pod.quota, pod.period)
    if not workload and pod.memory <= 0:
        return _fixed(_single(sizing.default_vcpus))
    return _fixed(max(1.0, _single(_single(sizing.overhead_vcpus) + workload)))


def _rust_by_containers(sizing: Sizing, pod: PodCpu) -> VmSize:
    """Grow as containers are added, never shrinking then; an update does shrink."""
    default = _single(sizing.default_vcpus)
    boot = math.ceil(default)
    running = boot
    for number in range(len(pod.containers) + 1):
        wanted = _rust_wanted(default, pod.containers[:number])
        if wanted > running:
            running = _bounded(sizing, math.ceil(wanted))
    updated = _bounded(sizing, math.ceil(max(1.0, _rust_wanted(default, pod.containers))))
    return VmSize(boot, running, updated if updated >= boot else None)


def _rust_wanted(default: float, containers: tuple[ContainerCpu, ...]) -> float:
    limited = [container for container in containers if container.limited]
    longest = max((container.period for container in containers), default=0)
    total = sum(container.quota * (longest / container.period) for container in limited)
    cpus = len(union(container.cpus for container in containers))
    if total:
        return _single(_single(total / longest) + default)
    return float(cpus) if cpus else max(1.0, default)


def _bounded(sizing: Sizing, vcpus: int) -> int:
    return min(vcpus, sizing.default_maxvcpus) if sizing.default_maxvcpus else vcpus


def _single(value: float) -> float:
    """Return the value in the precision of a 32-bit float."""
    (rounded,) = unpack("f", pack("f", value))
    return float(rounded)


RULES: Final = (
    Rule(
        KataRuntime.GO,
        static=True,
        since=(0,),
        size=_by_quota,
        text="default_vcpus + the pod's quota / period",
    ),
    Rule(
        KataRuntime.GO,
        static=True,
        since=(3, 32),
        size=_go_by_quota_or_shares,
        text="default_vcpus + the pod's quota / period, or its shares / 1024 if the quota is -1",
    ),
    Rule(
        KataRuntime.GO,
        static=False,
        since=(0,),
        size=_go_by_containers,
        text="default_vcpus + the containers' quota / period, or if none has a quota, the sizes "
        "of their cpusets",
    ),
    Rule(
        KataRuntime.RUST,
        static=True,
        since=(3, 25),
        size=_rust_as_configured,
        text="default_vcpus",
    ),
    Rule(
        KataRuntime.RUST,
        static=True,
        since=(3, 29),
        size=_by_quota,
        text="default_vcpus + the pod's quota / period",
    ),
    Rule(
        KataRuntime.RUST,
        static=True,
        since=(4, 0),
        size=_rust_overhead_and_quota,
        text="overhead_vcpus + the pod's quota / period (a quota of -1 counts 0), at least 1; "
        "default_vcpus only for a pod without a quota and without a memory limit",
    ),
    Rule(
        KataRuntime.RUST,
        static=False,
        since=(3, 25),
        size=_rust_by_containers,
        text="default_vcpus + the containers' quota / period, or if none has a quota, the size of "
        "the union of their cpusets",
    ),
)
"""Sorted by version for each runtime and way of sizing. Sources, of kata-containers: for Go
pkg/oci/utils.go (CalculateSandboxSizing) and virtcontainers/sandbox.go (calculateSandboxCPUs), for
runtime-rs crates/resource/src/cpu_mem (initial_size.rs, cpu.rs)."""


# What gives a VM the vCPUs that it lacks: rows, each with the condition under which it works.
#
# `seen` says on what each was tried, most on the real shim (docs/kata.md says how); what did not
# work there is in that document only.

QUOTA: Final = (
    "before Kubernetes 1.37 keep the CPU quota of exclusive containers, which sizes the VM: kubelet"
    " feature gate DisableCPUQuotaWithExclusiveCPUs=false"
)

DROP_IN: Final = "config.d/90-kata-pin.toml"
"""Beside the handler's configuration file, links of it resolved; Kata reads drop-ins by name."""


class Lack(Struct, frozen=True):
    """What a VM lacks: it has or will have `vcpus` for so many exclusive CPUs.

    `qemu`: its VMM is QEMU, the only one that the rows for runtime-rs were tried with.
    `default_vcpus` is what Kata's configuration says, None where it is not known. `template` is as
    in Sizing.
    """

    runtime: KataRuntime
    exclusive: int
    vcpus: int
    qemu: bool = True
    default_vcpus: float | None = None
    template: bool = False

    @property
    def missing(self) -> int:
        """Return how many vCPUs each exclusive CPU and the guest's own work still need."""
        return max(0, self.exclusive + 1 - self.vcpus)


class VmRemedy(Struct, frozen=True):
    """One remedy: `fits` says where it works, `text` what to do, `content` what its drop-in says.

    `path` is the file to write. `others`: what it changes for other pods. `seen`: on what it was
    tried.
    """

    name: str
    fits: Callable[[Lack], bool]
    text: Callable[[Lack], str]
    path: str
    content: Callable[[Lack], str]
    others: str
    seen: str


def remedies(lack: Lack) -> tuple[VmRemedy, ...]:
    """Return the rows that work here; none where nothing is missing."""
    return tuple(row for row in REMEDIES if lack.missing and row.fits(lack))


def overhead_vcpus(exclusive: int) -> float:
    """Return overhead_vcpus for pods of so many exclusive CPUs: 0.2 is Kata's own default."""
    return exclusive + 0.2


def class_drop_in(exclusive: int) -> str:
    """Return the drop-in that sizes VMs for so many exclusive CPUs (runtime-rs, QEMU)."""
    return f"[hypervisor.qemu]\noverhead_vcpus = {overhead_vcpus(exclusive)}\n"


def _own_class(lack: Lack) -> str:
    return (
        f"give pods with {count(lack.exclusive, 'exclusive CPU')} a RuntimeClass of their own, with"
        f" overhead_vcpus = {overhead_vcpus(lack.exclusive)} under [hypervisor.qemu] in a drop-in"
        " of config.d, beside Kata's configuration file, and static_sandbox_resource_mgmt = true"
        f" (runtime-rs' default): kata-pin kata-class --cpus {lack.exclusive}"
    )


def _raised(lack: Lack) -> str:
    return f"raise default_vcpus by {lack.missing} in Kata's configuration"


def _raised_drop_in(lack: Lack) -> str:
    if lack.default_vcpus is None:
        value = f"N + {lack.missing}  # N: what it is now"
    else:
        value = f"{lack.default_vcpus + lack.missing:g}"
    return f"[hypervisor.qemu]\ndefault_vcpus = {value}\n"


REMEDIES: Final = (
    VmRemedy(
        name="default_vcpus",
        fits=lambda lack: lack.runtime is KataRuntime.GO,
        text=_raised,
        path=DROP_IN,
        content=_raised_drop_in,
        others="every VM of the handler gets as many vCPUs more",
        seen="Go runtime 1.13 to 4.1, QEMU",
    ),
    VmRemedy(
        name="template",
        fits=lambda lack: lack.template and lack.qemu,
        text=lambda _: (
            "set enable_template = false under [hypervisor.qemu.factory] in Kata's configuration: a"
            " VM of the template has default_vcpus, and nothing is added"
        ),
        path=DROP_IN,
        content=lambda _: "[hypervisor.qemu.factory]\nenable_template = false\n",
        others="every VM of the handler boots, which takes longer and shares no memory",
        seen="runtime-rs' sources of 4.1.0; not tried",
    ),
    VmRemedy(
        name="class",
        fits=lambda lack: lack.runtime is KataRuntime.RUST and lack.qemu and not lack.template,
        text=_own_class,
        path=DROP_IN,
        content=lambda lack: class_drop_in(lack.exclusive),
        others="none: only pods of the class have it, each as many vCPUs more than its limits say",
        seen="runtime-rs 4.1.0, QEMU, containerd: 3 vCPUs for 2 exclusive CPUs, updates work",
    ),
    VmRemedy(
        name="quota",
        fits=lambda lack: lack.runtime is KataRuntime.GO or (lack.qemu and not lack.template),
        text=lambda _: QUOTA,
        path="the kubelet's configuration",
        content=lambda _: "featureGates: {DisableCPUQuotaWithExclusiveCPUs: false}\n",
        others="every pod with exclusive CPUs of the node is throttled at its limit again",
        seen="runtime-rs 4.1.0, QEMU, containerd: 3 vCPUs for 2 exclusive CPUs",
    ),
)
