"""The files of a sandbox: below /run/vc as the Go runtime keeps them, or /run/kata as runtime-rs.

persist.json is Kata 3.21's own, recorded, with this sandbox's values put in: so it has every key
that Kata writes. It is truncated and rewritten in place, as Kata does; a reader may see half of it.
runtime-rs writes state.json once, when the sandbox is up: Kata 4.1's own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tests.e2e.minikata.machine import Places
from tests.e2e.minikata.settings import ROOT, Settings

_RECORDED: Final = f"{ROOT}/tests/data/kata-3.21/sandbox"
_RECORDED_RS: Final = f"{ROOT}/tests/data/kata-4.1"


class Files:
    """Where one sandbox's files are, and writing them."""

    def __init__(self, settings: Settings, sandbox: str, bundle: str) -> None:
        self._go = settings.go
        base = settings.vc if settings.go else settings.kata
        self._state = f"{base}/sbs/{sandbox}" if settings.go else f"{base}/{sandbox}"
        self.vm = f"{base}/vm/{sandbox}" if settings.go else f"{base}/{sandbox}"
        sockets = self.vm if settings.go else f"{self.vm}/root"
        self._shared = f"{settings.shared}/{sandbox}"
        # runtime-rs binds a name without a folder: the shim's cwd is the sandbox's bundle.
        self.qmp = f"{self.vm}/qmp.sock" if settings.go else "qmp.sock"
        self.bundle = bundle
        self.places = Places(
            console=f"{sockets}/console.sock",
            console_log=f"{self.vm}/console.log",
            file_server=f"{sockets}/{'vhost-fs' if settings.go else 'virtiofsd'}.sock",
            extra_monitor=f"{self.vm}/extra-monitor.sock",
            pidfile=f"{self.vm}/pid",
            shared=f"{self._shared}/shared",
        )
        self._monitor: socket.socket | None = None
        for folder in (self._state, self.vm, sockets):
            os.makedirs(folder, 0o750, exist_ok=True)
        for name in ("shared", "mounts"):
            os.makedirs(f"{self._shared}/{name}", 0o700, exist_ok=True)

    def open_shim_monitor(self) -> None:
        """Bind the management socket that Kata's shim has; nothing answers there."""
        self._monitor = socket.socket(socket.AF_UNIX)
        self._monitor.bind(f"{self._state}/shim-monitor.sock")
        with open(f"{self.bundle}/monitor_address", "w", encoding="utf-8") as file:
            file.write(f"unix://{self._state}/shim-monitor.sock")

    def write_sandbox(self, document: Mapping[str, Any]) -> None:
        """Rewrite persist.json (Go) or state.json (runtime-rs)."""
        _rewrite(f"{self._state}/{'persist' if self._go else 'state'}.json", document)

    def write_container(self, container: str, state: str) -> None:
        """Rewrite a container's persist.json; only the Go runtime has one."""
        if not self._go:
            return
        document = _recorded("run_vc_sbs_p1_p1_persist.json")
        document["State"] = state
        document["Process"]["Token"] = container
        os.makedirs(f"{self._state}/{container}", 0o700, exist_ok=True)
        _rewrite(f"{self._state}/{container}/persist.json", document)

    def remove_container(self, container: str) -> None:
        """Remove a container's folder."""
        if self._go:
            shutil.rmtree(f"{self._state}/{container}", ignore_errors=True)

    def remove(self) -> None:
        """Remove all of it, as Kata does when the sandbox's VM is stopped."""
        if self._monitor is not None:
            self._monitor.close()
        for folder in (self.vm, self._state, self._shared):
            shutil.rmtree(folder, ignore_errors=True)
        if not self._go:
            for path in (f"{self.bundle}/qmp.sock",):
                if os.path.exists(path):
                    os.unlink(path)


def persist(
    settings: Settings,
    hypervisor: Mapping[str, Any],
    cgroups: tuple[str, str],
    containers: Sequence[Mapping[str, Any]],
    *,
    state: str,
    netns: str,
    cid: int,
) -> dict[str, Any]:
    """Return persist.json of the Go runtime. `cgroups` are the sandbox's and the overhead's."""
    document = _recorded("run_vc_sbs_p1_persist.json")
    document["State"] = state
    document["SandboxContainer"] = containers[0]["ID"]
    document["SandboxCgroupPath"], document["OverheadCgroupPath"] = cgroups
    document["HypervisorState"].update(hypervisor)
    document["AgentState"]["URL"] = f"vsock://{cid}:1024" if cid else ""
    document["Network"]["NetworkID"] = netns
    config = document["Config"]
    config["ContainerConfigs"] = list(containers)
    config["NetworkConfig"]["NetworkID"] = netns
    config["SandboxCgroupOnly"] = settings.cgroup_only
    config["EnableVCPUsPinning"] = settings.enable_vcpus_pinning
    config["HypervisorConfig"].update(
        KernelPath=settings.kernel,
        InitrdPath=settings.initrd,
        HypervisorPath=settings.hypervisor,
        HypervisorPathList=[settings.hypervisor],
        NumVCPUsF=settings.default_vcpus,
        DefaultMaxVCPUs=settings.maximum,
        MemorySize=settings.default_memory,
        EnableIOThreads=settings.enable_iothreads,
        Debug=settings.enable_debug,
    )
    return document


def rs_state(settings: Settings, sandbox: str, cgroups: tuple[str, str]) -> dict[str, Any]:
    """Return state.json of runtime-rs: QEMU's pid is null in it, virtiofsd's 0."""
    document = _recorded("state.json", _RECORDED_RS)
    document["resource"]["cgroup_state"].update(
        path=cgroups[0].lstrip("/"),
        overhead_path=cgroups[1].lstrip("/"),
        sandbox_cgroup_only=settings.cgroup_only,
        enable_vcpus_pinning=settings.enable_vcpus_pinning,
    )
    document["hypervisor"]["id"] = sandbox
    document["hypervisor"]["config"].update(
        default_vcpus=float(settings.default_vcpus),
        default_maxvcpus=settings.maximum,
        default_memory=settings.default_memory,
        overhead_vcpus=settings.overhead_vcpus,
        enable_iothreads=settings.enable_iothreads,
        enable_debug=settings.enable_debug,
        path=settings.hypervisor,
        valid_hypervisor_paths=[settings.hypervisor],
        kernel=settings.kernel,
        initrd=settings.initrd,
    )
    return document


def _recorded(name: str, folder: str = "") -> dict[str, Any]:
    with open(f"{folder or _RECORDED}/{name}", encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document


def _rewrite(path: str, document: Mapping[str, Any]) -> None:
    """Truncate and rewrite in place (Kata's persist/fs ToDisk): not atomic."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(opened, "w", encoding="utf-8") as file:
        json.dump(document, file, separators=(",", ":"))
