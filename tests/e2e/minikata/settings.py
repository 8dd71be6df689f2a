"""What a minikata sandbox is like: defaults, a JSON file, annotations, in that order.

The file is `--config`'s, else /etc/minikata.json; its keys are the names of Settings. Annotations
have Kata's own names where Kata has one. Read once when a sandbox is created.
Out of scope: checking. A wrong value fails where it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tests.e2e.minikata import sizing

FILE: Final = "/etc/minikata.json"
ROOT: Final = os.path.realpath(f"{os.path.dirname(__file__)}/../../..")


class Settings(NamedTuple):
    """One sandbox's settings; the values are the defaults of Kata's Go runtime where it has them.

    `runtime` go or rs; `guest` idle (no operating system) or linux (tests/e2e/guest);
    `accel` auto, kvm or tcg; `default_maxvcpus` 0 for the host's number of CPUs;
    `sandbox_cgroup_only` and `static_sandbox_resource_mgmt` None for the runtime's default;
    `scale` multiplies every deadline.
    """

    runtime: str = "go"
    guest: str = "idle"
    hypervisor: str = "/usr/bin/qemu-system-x86_64"
    accel: str = "auto"
    cpu_features: str = "pmu=off"
    firmware: str = f"{ROOT}/.cache/firmware/idle.rom"
    kernel: str = ""
    initrd: str = ""
    default_vcpus: int = 1
    overhead_vcpus: float = 0.2
    default_maxvcpus: int = 0
    default_memory: int = 512
    enable_iothreads: bool = False
    enable_debug: bool = False
    extra_monitor_socket: bool = False
    sandbox_cgroup_only: bool | None = None
    static_sandbox_resource_mgmt: bool | None = None
    enable_vcpus_pinning: bool = False
    virtiofsd: bool = True
    network: bool = True
    vsock: bool = True
    vc: str = "/run/vc"
    kata: str = "/run/kata"
    shared: str = "/run/kata-containers/shared/sandboxes"
    scale: float = 1.0

    @property
    def go(self) -> bool:
        """Whether the Go runtime is imitated, else runtime-rs."""
        return self.runtime == "go"

    @property
    def cgroup_only(self) -> bool:
        """Whether everything goes to the sandbox cgroup; runtime-rs does so by default."""
        return not self.go if self.sandbox_cgroup_only is None else self.sandbox_cgroup_only

    @property
    def static(self) -> bool:
        """Whether the VM is sized before it boots, and never again; runtime-rs' default."""
        given = self.static_sandbox_resource_mgmt
        return not self.go if given is None else given

    @property
    def maximum(self) -> int:
        """The most vCPUs that the VM can have."""
        return max(self.default_vcpus, self.default_maxvcpus or os.cpu_count() or 1)


_HYPERVISOR: Final = "io.katacontainers.config.hypervisor."
_RUNTIME: Final = "io.katacontainers.config.runtime."

_ANNOTATIONS: Final = {
    "minikata.runtime": "runtime",
    "minikata.guest": "guest",
    _HYPERVISOR + "default_vcpus": "default_vcpus",
    _HYPERVISOR + "default_max_vcpus": "default_maxvcpus",
    _HYPERVISOR + "default_memory": "default_memory",
    _HYPERVISOR + "enable_iothreads": "enable_iothreads",
    _RUNTIME + "sandbox_cgroup_only": "sandbox_cgroup_only",
    # The two runtimes have different keys for this one (Go: pkg/annotations; rs: kata-types).
    "io.katacontainers.enable_vcpus_pinning": "enable_vcpus_pinning",
    _RUNTIME + "enable_vcpus_pinning": "enable_vcpus_pinning",
}


def read(path: str, annotations: Mapping[str, str]) -> Settings:
    """Return the settings of a sandbox; `path` empty is the file in /etc, which may be missing."""
    given: dict[str, Any] = {}
    if path or os.path.exists(FILE):
        with open(path or FILE, encoding="utf-8") as file:
            given = json.load(file)
    for name, key in _ANNOTATIONS.items():
        if name in annotations:
            given[key] = _value(annotations[name])
    settings = Settings(**given)
    if not settings.static:
        return settings
    boot = (sizing.static_go if settings.go else sizing.static_rs)(
        settings.default_vcpus, settings.overhead_vcpus, sizing.of_sandbox(annotations)
    )
    return settings._replace(default_vcpus=boot, default_maxvcpus=boot)


def _value(text: str) -> str | int | bool:
    if text in {"true", "false"}:
        return text == "true"
    return int(text) if text.isdigit() else text
