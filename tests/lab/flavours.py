"""The lab machines that exist: Debian release, processor model and cgroup version.

A flavour is what a test run asks for; an image is what is built. All flavours of one release share
its image, because they differ in QEMU's and the kernel's arguments only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tests.lab.errors import LabError

Model = Literal["kvm", "smt"]
Accel = Literal["kvm", "tcg"]

CPUS: Final = 16
NODES: Final = 2
MEMORY_MIB: Final = 3072
DEFAULT: Final = "trixie-kvm"

_KERNEL_ARGUMENTS: Final = (
    "root=/dev/vda rw console=ttyS0 panic=-1 mitigations=off random.trust_cpu=on "
    # 16 emulated CPUs on two real ones look stalled to the watchdogs, and are not.
    "nowatchdog rcupdate.rcu_cpu_stall_suppress=1 no_timer_check audit=0 "
    # QEMU's TSC never goes backwards; Linux distrusts it and reads an HPET, each time through QEMU.
    "tsc=reliable "
    # Its daemon takes a minute of CPU time where many QEMUs run.
    "transparent_hugepage=never "
    "systemd.show_status=0"
)


@dataclass(frozen=True, slots=True)
class Suite:
    """A Debian release: what its packages mean for the tests."""

    name: str
    python: str
    kernel: str
    pins_stick: bool
    """A pin survives a rewrite of the cpuset (kernel >= 6.2, facts in docs/lab.md)."""
    nri: bool


SUITES: Final = {
    suite.name: suite
    for suite in (
        Suite("trixie", python="3.13", kernel="6.12", pins_stick=True, nri=True),
        Suite("bookworm", python="3.11", kernel="6.1", pins_stick=False, nri=False),
    )
}


@dataclass(frozen=True, slots=True)
class Flavour:
    """One kind of lab machine."""

    name: str
    suite: Suite
    model: Model
    cgroup: int = 2

    @property
    def threads(self) -> int:
        """CPUs of one core."""
        return 2 if self.model == "smt" else 1

    @property
    def cores(self) -> int:
        """Cores of one package."""
        return CPUS // NODES // self.threads

    @property
    def kernel_arguments(self) -> str:
        """The kernel's command line."""
        if self.cgroup == 2:
            return _KERNEL_ARGUMENTS
        # Both are needed: the first alone gives systemd's hybrid of v1 and v2.
        return (
            f"{_KERNEL_ARGUMENTS} systemd.unified_cgroup_hierarchy=0 "
            "systemd.legacy_systemd_cgroup_controller=1"
        )

    def cpu_arguments(self, accel: Accel) -> list[str]:
        """QEMU's -cpu, -smp and -numa.

        TCG's `max` calls itself AMD, emulates SVM (so KVM works inside) and hides threads from
        Linux; with an Intel name threads are seen and SVM is not.
        """
        if accel == "kvm":
            cpu = "host"
        else:
            cpu = "max" if self.model == "kvm" else "max,vendor=GenuineIntel"
        smp = f"{CPUS},sockets={NODES},cores={self.cores},threads={self.threads}"
        arguments = ["-cpu", cpu, "-smp", smp, "-m", f"{MEMORY_MIB}M"]
        share = CPUS // NODES
        for node in range(NODES):
            first = node * share
            arguments += [
                "-object",
                f"memory-backend-ram,id=node{node},size={MEMORY_MIB // NODES}M",
                "-numa",
                f"node,nodeid={node},memdev=node{node},cpus={first}-{first + share - 1}",
            ]
        return arguments


FLAVOURS: Final = {
    flavour.name: flavour
    for flavour in (
        Flavour("trixie-kvm", SUITES["trixie"], "kvm"),
        Flavour("trixie-smt", SUITES["trixie"], "smt"),
        Flavour("bookworm-kvm", SUITES["bookworm"], "kvm"),
        Flavour("bookworm-smt", SUITES["bookworm"], "smt"),
        Flavour("bookworm-v1", SUITES["bookworm"], "kvm", cgroup=1),
    )
}


def flavour(name: str) -> Flavour:
    """Return the flavour of that name; raise LabError naming those that exist."""
    try:
        return FLAVOURS[name]
    except KeyError:
        raise LabError(f"no flavour {name!r}; there are: {', '.join(FLAVOURS)}") from None
