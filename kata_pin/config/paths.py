"""The settings that say where things are on a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kata_pin.config.kinds import PATH, listing, setting

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


@dataclass(frozen=True)
class Paths:
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
