"""Sandboxes laid out on the host exactly as Kata lays them out, with real QEMU inside.

    dirs = KataDirs.below(tmp)              # run/vc, run/kata, bundles ... of its own
    with KataSandbox(dirs, "p1") as kata:   # starts QEMU; its stand-in shim holds qmp.sock
        kata.shim.plug(2)
        kata.write_persist([ContainerSpec("c1", cpus="4-5", quota=200000)])

Used by tests, the demo and the benchmark; needs root, as Kata does. Every process is ended by pid
in stop(), which a failed start calls too. The shapes are those recorded from Kata 3.21.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support import qemu
from tests.support.qemu import Accelerator, Machine
from tests.support.shim import QMP_FD, LocalShim, Shim, kill_pid
from tests.support.shim_process import ProcessShim

MAX_SOCKET_PATH = 107
VIRTIOFSD = Path("/usr/lib/qemu/virtiofsd")

_running: weakref.WeakSet[KataSandbox] = weakref.WeakSet()


class Runtime(StrEnum):
    """Which of Kata's runtimes is imitated."""

    GO = "go"
    RS = "rs"


@dataclass(frozen=True)
class KataDirs:
    """The directories that Kata uses, below a private root. Real ones: /run/vc, /run/kata ..."""

    vc: Path
    kata: Path
    bundles: Path
    shared: Path

    @classmethod
    def below(cls, root: Path) -> KataDirs:
        """Create them below `root`; keep it short, unix socket paths end at 107 characters."""
        dirs = cls(
            vc=root / "run/vc",
            kata=root / "run/kata",
            bundles=root / "run/containerd/io.containerd.runtime.v2.task/k8s.io",
            shared=root / "run/kata-containers/shared/sandboxes",
        )
        for path in (dirs.vc / "vm", dirs.vc / "sbs", dirs.kata, dirs.bundles, dirs.shared):
            path.mkdir(parents=True, exist_ok=True)
        return dirs


@dataclass(frozen=True)
class ContainerSpec:
    """A container as persist.json shows it; `cpus` None is a container without a cpuset."""

    id: str
    cpus: str | None = None
    quota: int | None = None
    period: int | None = 100000
    shares: int | None = None

    def entry(self, sandbox_id: str, bundle: Path) -> dict[str, Any]:
        """Return its entry in Config.ContainerConfigs."""
        pause = self.id == sandbox_id
        cpu = {"cpus": self.cpus, "quota": self.quota, "shares": self.shares}
        if self.quota is not None:
            cpu["period"] = self.period
        return {
            "ID": self.id,
            "Annotations": {
                "io.katacontainers.pkg.oci.bundle_path": str(bundle),
                "io.katacontainers.pkg.oci.container_type": (
                    "pod_sandbox" if pause else "pod_container"
                ),
                "io.kubernetes.cri.container-type": "sandbox" if pause else "container",
                "io.kubernetes.cri.sandbox-id": sandbox_id,
            },
            "Resources": {"cpu": {k: v for k, v in cpu.items() if v is not None}},
            "RootFs": str(bundle / "rootfs"),
        }


@dataclass(eq=False)
class KataSandbox:
    """One sandbox: its directories, its QEMU and its shim.

    `shim_process` gives QEMU a parent that looks like Kata's shim; False is cheaper and makes the
    caller the parent. `cgroups` are directories whose cgroup.procs get QEMU's pid after its start,
    `overhead_cgroups` those that get the shim's before: what it starts is born there.
    `extra_monitor` adds Kata's debug monitor socket; `virtiofsd` a real, idle virtiofsd (it needs
    `shim_process`). `vcpu_pinning` is said in Kata's state; nobody acts on it. `agent_url` is where
    Kata's state says that the agent listens; nobody does by default. `booting`: the guest has not
    booted, so Kata has written no state yet. `before_vmm` is called when only the shim runs.
    `factory_vm` is what the Go runtime's factory named the VM: one that was cached without
    `shim_process`.
    """

    dirs: KataDirs
    id: str
    machine: Machine = field(default_factory=Machine)
    runtime: Runtime = Runtime.GO
    accelerator: Accelerator | None = None
    shim_process: bool = True
    extra_monitor: bool = False
    virtiofsd: bool = False
    vcpu_pinning: bool = False
    agent_url: str = ""
    factory_vm: str = ""
    booting: bool = False
    before_vmm: Callable[[], None] = lambda: None
    cgroups: Sequence[Path] = ()
    overhead_cgroups: Sequence[Path] = ()
    containers: Sequence[ContainerSpec] = ()
    pid: int = 0
    virtiofsd_pid: int = 0
    _shim: Shim | None = None

    @property
    def shim(self) -> Shim:
        """The running shim."""
        assert self._shim is not None, "not started"
        return self._shim

    @property
    def _vm(self) -> str:
        """What QEMU is named after."""
        return self.factory_vm or self.id

    @property
    def vm_dir(self) -> Path:
        """Where the runtime keeps the VM's sockets."""
        go = self.runtime is Runtime.GO
        return self.dirs.vc / "vm" / self._vm if go else self.dirs.kata / self.id

    @property
    def bundle(self) -> Path:
        """The sandbox container's bundle; runtime-rs has qmp.sock in it."""
        return self.dirs.bundles / self.id

    @property
    def qmp_path(self) -> Path:
        """The main QMP socket."""
        return (self.vm_dir if self.runtime is Runtime.GO else self.bundle) / "qmp.sock"

    @property
    def extra_monitor_path(self) -> Path:
        """Kata's debug monitor socket, whether enabled or not."""
        return self.vm_dir / "extra-monitor.sock"

    @property
    def pidfile(self) -> Path:
        """QEMU's -pidfile; only the Go runtime has one."""
        return self.dirs.vc / "vm" / self._vm / "pid"

    @property
    def persist_path(self) -> Path:
        """Where persist.json (Go) or state.json (runtime-rs) lies."""
        if self.runtime is Runtime.GO:
            return self.dirs.vc / "sbs" / self.id / "persist.json"
        return self.dirs.kata / self.id / "state.json"

    @property
    def shared_dir(self) -> Path:
        """The directory that virtiofsd shares with the guest."""
        return self.dirs.shared / self.id / "shared"

    def start(self) -> Self:
        """Start QEMU and return once QMP answers; the shim then holds qmp.sock."""
        self._make_directories()
        accelerator = self.accelerator or qemu.accelerator()
        shim = ProcessShim(self.id, self.bundle) if self.shim_process else LocalShim()
        self._shim = shim
        _running.add(self)
        try:
            for cgroup in self.overhead_cgroups:
                (cgroup / "cgroup.procs").write_text(str(shim.pid))
            self.before_vmm()
            log = self.vm_dir / "qemu.log"
            self.pid = shim.start(self._argv(accelerator), self._socket_path(), str(log))
            for cgroup in self.cgroups:
                (cgroup / "cgroup.procs").write_text(str(self.pid))
            if self.virtiofsd:
                assert isinstance(shim, ProcessShim), "virtiofsd is a child of the shim process"
                self.virtiofsd_pid = shim.spawn(self.virtiofsd_argv())
            if not self.booting:
                self.write_persist(self.containers or [ContainerSpec(self.id)])
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End every process of the sandbox and remove its directories; safe to repeat."""
        _running.discard(self)
        if self._shim is not None:
            self._shim.stop()
            self._shim = None
        for pid in (self.virtiofsd_pid, self.pid):
            if pid and self._is_ours(pid):
                kill_pid(pid)
        self.pid = self.virtiofsd_pid = 0
        for path in (self.vm_dir, self.persist_path.parent, self.shared_dir.parent, self.bundle):
            shutil.rmtree(path, ignore_errors=True)
        if self.factory_vm:
            (self.vm_dir.parent / self.id).unlink(missing_ok=True)

    def orphan(self) -> None:
        """Kill the shim only: QEMU stays behind without it."""
        self.shim.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def vcpus(self) -> dict[int, int]:
        """Return the truth from QEMU: tid by cpu-index."""
        return {c["cpu-index"]: c["thread-id"] for c in self.shim.execute("query-cpus-fast")}

    def iothreads(self) -> dict[str, int]:
        """Return the truth from QEMU: tid by iothread id."""
        return {i["id"]: i["thread-id"] for i in self.shim.execute("query-iothreads")}

    def tids(self) -> list[int]:
        """Return the thread ids of QEMU, ascending."""
        return sorted(int(name) for name in os.listdir(f"/proc/{self.pid}/task"))

    def write_persist(self, containers: Iterable[ContainerSpec]) -> None:
        """Write persist.json as Kata does at each container event: truncated and rewritten."""
        self.containers = tuple(containers)
        self.persist_path.parent.mkdir(parents=True, exist_ok=True)
        document = self._persist() if self.runtime is Runtime.GO else self._rs_state()
        with self.persist_path.open("w") as file:
            os.fchmod(file.fileno(), 0o600)
            json.dump(document, file, separators=(",", ":"))

    def _make_directories(self) -> None:
        for path in (self.vm_dir, self.persist_path.parent, self.bundle, self.shared_dir):
            path.mkdir(parents=True, exist_ok=True)
        if self.factory_vm:
            (self.vm_dir.parent / self.id).symlink_to(self.vm_dir)
        if len(str(self.qmp_path)) > MAX_SOCKET_PATH:
            raise ValueError(f"socket path too long, use a shorter root: {self.qmp_path}")

    def _socket_path(self) -> str:
        """Return qmp.sock as the runtime binds it: runtime-rs by its name, in its cwd."""
        relative = self.runtime is Runtime.RS and self.shim_process
        return self.qmp_path.name if relative else str(self.qmp_path)

    def _argv(self, accelerator: Accelerator) -> list[str]:
        go = self.runtime is Runtime.GO
        machine = self.machine
        monitors = [f"unix:fd={QMP_FD},server=on,wait=off"]
        if self.extra_monitor:
            monitors.append(f"unix:path={self.extra_monitor_path},server=on,wait=off")
        sockets = f",cores=1,threads=1,sockets={machine.maximum}" if go else ""
        return qemu.command_line(
            f"sandbox-{self._vm}",
            machine,
            accelerator,
            smp=f"{machine.boot}{sockets},maxcpus={machine.maximum}",
            qmp=monitors,
            pidfile=self.pidfile if go else None,
        )

    def virtiofsd_argv(self) -> list[str]:
        """Return virtiofsd's arguments; the program of QEMU 7.2 ends without a syslog."""
        socket_path = self.vm_dir / "vhost-fs.sock"
        return [
            *(str(VIRTIOFSD), "--syslog", "-o", "cache=auto", "-o", f"source={self.shared_dir}"),
            *(f"--socket-path={socket_path}", "--thread-pool-size=1"),
        ]

    def _persist(self) -> dict[str, Any]:
        return {
            "State": "running",
            "SandboxContainer": self.id,
            "SandboxCgroupPath": f"/kata_{self.id}",
            "OverheadCgroupPath": f"/kata_overhead/{self.id}",
            "HypervisorState": {
                "Type": "qemu",
                "UUID": str(uuid.uuid5(uuid.NAMESPACE_OID, self.id)),
                "HotpluggedVCPUs": [],
                "VirtiofsDaemonPid": self.virtiofsd_pid,
                "Pid": self.pid,
            },
            "AgentState": {"URL": self.agent_url},
            "Config": {
                "HypervisorType": "qemu",
                "ContainerConfigs": [
                    container.entry(self.id, self.dirs.bundles / container.id)
                    for container in self.containers
                ],
                "HypervisorConfig": {
                    "HypervisorPath": qemu.QEMU,
                    "NumVCPUsF": self.machine.boot,
                    "DefaultMaxVCPUs": self.machine.maximum,
                    "EnableIOThreads": bool(self.machine.iothreads),
                    "SharedFS": "virtio-fs",
                    "VMid": self.factory_vm,
                },
                "SandboxCgroupOnly": False,
                "EnableVCPUsPinning": self.vcpu_pinning,
            },
            "PersistVersion": 2,
        }

    def _rs_state(self) -> dict[str, Any]:
        cgroup = {"path": f"/kata_{self.id}", "overhead_path": "", "sandbox_cgroup_only": True}
        hypervisor: dict[str, Any] = {"hypervisor_type": "qemu", "pid": None, "id": self.id}
        return {
            "sandbox_type": "virt_container",
            "resource": {"endpoint": [], "cgroup_state": cgroup},
            "hypervisor": {**hypervisor, "virtiofs_daemon_pid": 0},
        }

    def _is_ours(self, pid: int) -> bool:
        """Whether a pid that outlived the shim is still this sandbox's process, not a later one."""
        with contextlib.suppress(OSError):
            return self._vm.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False


def start_many(sandboxes: Sequence[KataSandbox], *, parallel: int = 4) -> None:
    """Start many sandboxes at once; if one fails, all are stopped and its error is raised."""
    qemu.accelerator()
    qemu.firmware()
    with ThreadPoolExecutor(parallel) as pool:
        try:
            for _ in pool.map(KataSandbox.start, sandboxes):
                pass
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            stop_many(sandboxes)
            raise


def stop_many(sandboxes: Iterable[KataSandbox]) -> None:
    """Stop them all."""
    for sandbox in sandboxes:
        sandbox.stop()


@atexit.register
def _stop_leftovers() -> None:
    stop_many(list(_running))
