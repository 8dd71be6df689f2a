"""A private node to measure on: folders on a tmpfs, real idle VMs, their bundles, a configuration.

Nothing outside its own folder is written; debugfs is mounted there, because a node has it and the
daemon names vCPU threads by it. `close` ends every VM and unmounts. Needs root, as Kata does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from kata_pin.base.config.tree import Config
from kata_pin.cli.node.files import hook_program
from kata_pin.linux.cgroup_mounts import cgroup_mounts
from kata_pin.linux.files import HOST
from kata_pin.linux.topology import online
from kata_pin.service.configuration import from_data
from tests.bench.figures import BenchError
from tests.support import qemu
from tests.support.daemon import QUIET
from tests.support.hooks import INTERPRETER
from tests.support.katalike import ContainerSpec, KataDirs, KataSandbox, start_many, stop_many
from tests.support.qemu import QEMU, TWENTY, Accelerator, Machine
from tests.support.vmmhost import SHIMS
from tests.support.waiting import wait_for

SHM = "/dev/shm"


@dataclass(frozen=True)
class Container:
    """A container that hooks speak of: its bundle exists, `state` is what a runtime hands over."""

    id: str
    bundle: Path

    def state(self, pid: int, shown_id: str = "") -> bytes:
        """Return the state JSON; `shown_id` where Kata gives another id than the container's."""
        return json.dumps(
            {
                "ociVersion": "1.1.0",
                "id": shown_id or self.id,
                "status": "creating",
                "pid": pid,
                "bundle": str(self.bundle),
            }
        ).encode()


class BenchNode:
    """The folders and the VMs; a context manager."""

    def __init__(self) -> None:
        if os.geteuid() != 0:
            raise BenchError("needs root: a VM's threads are not ours to pin")
        self.root = Path(tempfile.mkdtemp(prefix="kpb-", dir=SHM))
        self.root.chmod(0o755)  # the daemon is not root
        self.dirs = KataDirs.below(self.root)
        self.runtime_dir = self.root / "run/kata-pin"
        self.debugfs = self.root / "debug"
        self.sandboxes: list[KataSandbox] = []
        self.online = online(HOST)
        self._closing = contextlib.ExitStack()
        self._mount_debugfs()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stop_many(self.sandboxes)
        self._closing.close()
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def last_cpu(self) -> int:
        """The pCPU that containers are given here."""
        return list(self.online)[-1]

    def hook_command(self) -> tuple[str, ...]:
        """Return what starts the hook as `kata-pin install` writes it; a phase follows."""
        program = self.root / "kata-pin-hook"
        program.write_bytes(hook_program(INTERPRETER))
        return INTERPRETER, "-IS", str(program), f"--runtime-dir={self.runtime_dir}"

    def start(self, count: int, machine: Machine = TWENTY, *, prefix: str = "vm") -> None:
        """Start idle VMs, each with a pause container and one with an exclusive pCPU.

        They are children of this process: their shims hold qmp.sock but are no processes.
        """
        fresh = [
            KataSandbox(
                self.dirs,
                f"{prefix}{number:04d}",
                machine,
                shim_process=False,
                containers=self.specs(f"{prefix}{number:04d}"),
            )
            for number in range(count)
        ]
        self.sandboxes += fresh
        start_many(fresh, parallel=2)
        for sandbox in fresh:
            self._confine(sandbox)

    def specs(self, sandbox_id: str) -> list[ContainerSpec]:
        """Return what Kata's persist.json says of a sandbox's two containers."""
        work = ContainerSpec(f"{sandbox_id}-c1", cpus=str(self.last_cpu), quota=100_000)
        return [ContainerSpec(sandbox_id), work]

    def container(
        self, sandbox_id: str, name: str = "", *, cpus: str | None = None, kata: bool = True
    ) -> Container:
        """Make a bundle with the annotations of containerd's CRI; without a name the sandbox's."""
        container_id = f"{sandbox_id}-{name}" if name else sandbox_id
        bundle = self.dirs.bundles / container_id
        bundle.mkdir(exist_ok=True)
        config = _config(container_id, sandbox_id, cpus, handler="kata" if kata else "runc")
        (bundle / "config.json").write_text(json.dumps(config))
        return Container(container_id, bundle)

    def config(self) -> Config:
        """Return the daemon's configuration; nothing is done unasked, as audits are rare."""
        return from_data({**self._settings(), "audit": QUIET})

    def config_file(self, **settings: Any) -> Path:
        """Write it as a file for `kata-pin --config`, with the usual audits."""
        file = self.root / "config.yaml"
        file.write_text(yaml.safe_dump({**self._settings(), **settings}))
        return file

    def _settings(self) -> dict[str, Any]:
        return {
            "version": 1,
            "runtime_dir": str(self.runtime_dir),
            "shims": list(SHIMS),
            "hypervisors": [QEMU],
            "paths": {
                "vc": str(self.dirs.vc),
                "kata": str(self.dirs.kata),
                "debugfs": str(self.debugfs),
                "bundle_roots": [str(self.root / "run/containerd")],
                "kubelet_state": str(self.root / "no-kubelet"),
                "kata_configs": [],
            },
        }

    def _confine(self, sandbox: KataSandbox) -> None:
        """Give a VM a cgroup with all CPUs, as Kata does, where one can be made."""
        for mount in sorted(cgroup_mounts(HOST), key=lambda one: not one.v1):
            top, folder = Path(mount.point), Path(mount.point, f"{self.root.name}-{sandbox.id}")
            with contextlib.suppress(OSError):
                folder.mkdir()
                self._closing.callback(_remove_cgroup, folder)
                for name in ("cpuset.cpus", "cpuset.mems") if mount.v1 else ():
                    (folder / name).write_text((top / name).read_text())
                (folder / "cgroup.procs").write_text(str(sandbox.pid))
                return

    def _mount_debugfs(self) -> None:
        self.debugfs.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "debugfs", "none", str(self.debugfs)], capture_output=True, check=False
        )
        if mounted.returncode == 0:
            self._closing.callback(
                subprocess.run, ["umount", str(self.debugfs)], check=False, capture_output=True
            )


def _remove_cgroup(folder: Path) -> None:
    with contextlib.suppress(OSError):
        procs = folder / "cgroup.procs"
        wait_for(lambda: not procs.read_text(), "the VM to leave its cgroup")
        folder.rmdir()


def scatter(tids: Sequence[int], cpus: frozenset[int]) -> None:
    """Give every thread all CPUs: whatever a pass finds there has to be set."""
    for tid in tids:
        os.sched_setaffinity(tid, cpus)


def accelerator() -> Accelerator:
    """Return what runs the guests here."""
    return qemu.accelerator()


def _config(
    container_id: str, sandbox_id: str, cpus: str | None, *, handler: str
) -> dict[str, Any]:
    pause = container_id == sandbox_id
    cpu: dict[str, Any] = {"shares": 2}
    if cpus is not None:
        cpu = {"shares": 1024, "quota": 100_000, "period": 100_000, "cpus": cpus}
    return {
        "ociVersion": "1.1.0",
        "process": {"args": ["/pause"], "env": ["PATH=/usr/bin"], "cwd": "/"},
        "root": {"path": "rootfs", "readonly": True},
        "hostname": sandbox_id,
        "mounts": [
            {"destination": path, "type": "bind", "source": path, "options": ["rbind", "ro"]}
            for path in ("/proc", "/dev", "/sys", "/etc/hosts", "/etc/resolv.conf")
        ],
        "annotations": {
            "io.kubernetes.cri.container-type": "sandbox" if pause else "container",
            "io.kubernetes.cri.sandbox-id": sandbox_id,
            "io.kubernetes.cri.sandbox-name": f"pod-{sandbox_id}",
            "io.kubernetes.cri.sandbox-namespace": "bench",
            "io.kubernetes.cri.sandbox-uid": f"uid-{sandbox_id}",
            "io.containerd.cri.runtime-handler": handler,
        },
        "linux": {
            "resources": {"cpu": cpu},
            "cgroupsPath": f"/kubepods/pod{sandbox_id}/{container_id}",
        },
    }
