"""A host made of files: /proc, /sys, Kata's and the kubelet's files below one folder.

Only what the kernel, Kata and the kubelet would write is here; nothing of kata-pin. The tree has a
link to itself under its own path, so that a path of the running system leads into it too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

SYSFS: Final = Path(__file__).parent.parent / "data" / "sysfs"
QEMU: Final = "/usr/bin/qemu-system-x86_64"
SHIM: Final = "/usr/bin/containerd-shim-kata-v2"
PERIOD_US: Final = 100_000

Json = dict[str, Any]


def kernel_list(cpus: set[int] | frozenset[int]) -> str:
    """Return CPUs as the kernel lists them (`0-3,8`)."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs)


def cpu_numbers(text: str) -> set[int]:
    """Return the CPUs of such a list."""
    found: set[int] = set()
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _captured(name: str) -> list[str]:
    return (SYSFS / f"{name}.tree").read_text().splitlines()


def _flat(cores: int) -> list[str]:
    every = f"0-{cores - 1}"
    base = "sys/devices/system/cpu"
    lines = [f"{base}/{name}\t{every}" for name in ("online", "present", "possible")]
    for cpu in range(cores):
        topology = f"{base}/cpu{cpu}/topology"
        lines += [f"{topology}/core_cpus_list\t{cpu}", f"{topology}/physical_package_id\t0"]
    return lines


class Host:
    """The tree below `folder`; `affinities` are its threads', `cpusets` what cgroups allow."""

    def __init__(self, folder: Path, sysfs: str | int = 16) -> None:
        """`sysfs` is a tree of tests/data/sysfs, or a number of cores on one node."""
        self.folder = folder
        self.vc = folder / "run/vc"
        self.bundles = folder / "run/containerd/k8s.io"
        self.kubelet_state = folder / "cpu_manager_state"
        self.affinities: dict[int, set[int]] = {}
        self._owners: dict[int, int] = {}
        self._next = 1000
        itself = folder / str(folder).lstrip("/")
        itself.parent.mkdir(parents=True)
        itself.symlink_to(folder)
        for made in (self.vc / "sbs", self.vc / "vm", folder / "run/kata", self.bundles):
            made.mkdir(parents=True)
        for line in _flat(sysfs) if isinstance(sysfs, int) else _captured(sysfs):
            path, _, content = line.partition("\t")
            self.write(path, content)
        self.online = cpu_numbers(self.read("sys/devices/system/cpu/online"))
        self.write("proc/sys/kernel/osrelease", "6.12.0")
        self.write("proc/self/mountinfo", "30 29 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
        self.write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu memory")
        self.process("systemd", exe="/usr/lib/systemd/systemd", pid=1, ppid=0)
        self.process("kthreadd", pid=2, ppid=0, flags=0x0020_8040)

    def write(self, path: str, text: str) -> Path:
        """Write a file below the folder, with a newline as the kernel does."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def read(self, path: str) -> str:
        """Return a file's text."""
        return (self.folder / path).read_text().rstrip("\n")

    def set_online(self, cpus: str) -> None:
        """Have other CPUs online; threads lose those that went, as the kernel does it."""
        self.write("sys/devices/system/cpu/online", cpus)
        self.online = cpu_numbers(cpus)
        for tid, affinity in self.affinities.items():
            self.affinities[tid] = affinity & self.online or set(self.online)

    def cgroup(self, path: str, cpus: str = "") -> None:
        """Make a cgroup; `cpus` is its effective cpuset, all CPUs by default."""
        folder = f"sys/fs/cgroup{path}"
        self.write(f"{folder}/cpuset.cpus", cpus)
        self.write(f"{folder}/cpuset.cpus.effective", cpus or kernel_list(self.online))

    # ---- processes -----------------------------------------------------------------------

    def process(
        self,
        comm: str,
        *,
        exe: str = "",
        argv: Sequence[str] = (),
        pid: int = 0,
        ppid: int = 1,
        flags: int = 0x0040_0000,
        cgroup: str = "/",
    ) -> int:
        """Start a process; return its pid."""
        pid = pid or self.next_id()
        home = self.folder / "proc" / str(pid)
        home.mkdir(parents=True)
        if exe:
            (home / "exe").symlink_to(exe)
        (home / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in argv))
        (home / "fd").mkdir()
        (home / "cgroup").write_text(f"0::{cgroup}\n")
        uids = "\t".join("0" * 4)
        (home / "status").write_text(
            f"Name:\t{comm}\nTgid:\t{pid}\nPid:\t{pid}\nUid:\t{uids}\nNSpid:\t{pid}\n"
        )
        self.thread(pid, comm, tid=pid, ppid=ppid, flags=flags)
        shutil.copy(home / "task" / str(pid) / "stat", home / "stat")
        return pid

    def thread(
        self, pid: int, comm: str, *, tid: int = 0, ppid: int = 1, flags: int = 0x0040_0000
    ) -> int:
        """Start a thread, with its main thread's affinity; return its tid."""
        tid = tid or self.next_id()
        self._owners[tid] = pid
        folder = self.folder / "proc" / str(pid) / "task" / str(tid)
        folder.mkdir(parents=True)
        head = f"{tid} ({comm}) S {ppid} 1 1 0 -1 {flags}{' 0' * 4} 7 5 0 0 20 0 1 0 100"
        (folder / "stat").write_text(f"{head}{' 0' * 16} 2{' 0' * 13}\n")
        (folder / "comm").write_text(f"{comm}\n")
        shutil.copy(self.folder / "proc" / str(pid) / "cgroup", folder / "cgroup")
        self.affinities[tid] = set(self.affinities.get(pid, self.allowed(tid)))
        return tid

    def crowd(self, pid: int, count: int) -> None:
        """Give a process so many more threads, all like its main one."""
        folder = self.folder / f"proc/{pid}/task"
        for tid in range(100_000, 100_000 + count):
            (folder / str(tid)).symlink_to(str(pid))
            self.affinities[tid] = set(self.online)
            self._owners[tid] = pid

    def set_class(self, tid: int, policy: int, priority: int) -> None:
        """Give a thread a scheduling class: fields 40 and 41 of its stat file."""
        path = f"proc/{self._owners[tid]}/task/{tid}/stat"
        head, _, tail = self.read(path).rpartition(") ")
        fields = tail.split()
        fields[37:39] = str(priority), str(policy)
        self.write(path, f"{head}) {' '.join(fields)}")

    def allowed(self, tid: int) -> set[int]:
        """Return what the cgroup of a thread allows."""
        path = self.read(f"proc/{self._owners[tid]}/task/{tid}/cgroup").removeprefix("0::")
        effective = self.folder / f"sys/fs/cgroup{path}/cpuset.cpus.effective"
        return cpu_numbers(effective.read_text().strip()) if effective.exists() else self.online

    def tids(self, pid: int) -> list[int]:
        """Return the threads of a process."""
        return sorted(int(one.name) for one in (self.folder / f"proc/{pid}/task").iterdir())

    def end(self, pid: int) -> None:
        """End a process with all its threads."""
        for tid in self.tids(pid):
            self.affinities.pop(tid, None)
        shutil.rmtree(self.folder / "proc" / str(pid))

    def next_id(self) -> int:
        """Return a free pid."""
        self._next += 1
        return self._next

    # ---- the kubelet ---------------------------------------------------------------------

    def checkpoint(self, policy: str, default: str = "", entries: Json | None = None) -> None:
        """Write the kubelet's CPU manager checkpoint (v1, whose checksum nobody checks at 0)."""
        document = {"policyName": policy, "defaultCpuSet": default, "entries": entries or {}}
        self.kubelet_state.write_text(json.dumps(document | {"checksum": 0}))


class Vm:
    """A sandbox's VM on a host: its shim, its QEMU, and Kata's files about it."""

    def __init__(
        self, host: Host, sandbox_id: str, *, vcpus: int = 2, cpuset: str = "", agent_url: str = ""
    ) -> None:
        self.host = host
        self.id = sandbox_id
        self.containers: dict[str, Json] = {}
        self.agent_url = agent_url
        cgroup = f"/kata_{sandbox_id}"
        host.cgroup(cgroup, cpuset)
        shim_argv = [SHIM, "-namespace", "k8s.io", "-id", sandbox_id]
        self.shim = host.process("containerd-shim", exe=SHIM, argv=shim_argv)
        name = f"sandbox-{sandbox_id},debug-threads=on"
        smp = f"{vcpus},cores=1,threads=1,sockets=16,maxcpus=16"
        argv = [QEMU, "-name", name, "-accel", "kvm", "-smp", smp]
        self.pid = host.process(
            "qemu-system-x86", exe=QEMU, argv=argv, ppid=self.shim, cgroup=cgroup
        )
        self.vcpus = {n: host.thread(self.pid, f"CPU {n}/KVM") for n in range(vcpus)}
        self.iothread = host.thread(self.pid, "IO iothread0")
        (host.vc / "vm" / sandbox_id).mkdir(exist_ok=True)

    @property
    def masks(self) -> dict[str, str]:
        """The affinity of each vCPU (`v0`, `v1` ...), the iothread and the main thread."""
        named = {f"v{index}": tid for index, tid in self.vcpus.items()}
        named |= {"io": self.iothread, "main": self.pid}
        return {name: kernel_list(self.host.affinities[tid]) for name, tid in named.items()}

    def plug(self) -> int:
        """Give it another vCPU; return its tid."""
        index = len(self.vcpus)
        self.vcpus[index] = self.host.thread(self.pid, f"CPU {index}/KVM")
        return self.vcpus[index]

    def persist(self, **cpusets: str | None) -> None:
        """Write persist.json with these containers: their cpusets, None to leave one out."""
        for name, cpus in cpusets.items():
            self.containers[name] = {"cpu": {"cpus": cpus}} if cpus else {}
        folder = self.host.vc / "sbs" / self.id
        folder.mkdir(exist_ok=True)
        (folder / "persist.json").write_text(json.dumps(self._document()))

    def forget(self, name: str) -> None:
        """Take a container out of persist.json."""
        del self.containers[name]
        self.persist()

    def bundle(self, name: str, cpus: str = "", *, exclusive: bool = False, **spec: Any) -> Path:
        """Write a container's bundle as containerd does; `given` is memory of the kubelet's."""
        cpu: Json = {"cpus": cpus} if cpus else {}
        if given := spec.get("given"):
            cpu["mems"] = given
        if cpus:
            quota = {"quota": PERIOD_US * len(cpu_numbers(cpus)), "period": PERIOD_US}
            cpu |= quota if exclusive else {"shares": 102}
        kind = "sandbox" if name == self.id else "container"
        annotations = {
            "io.kubernetes.cri.container-type": kind,
            "io.kubernetes.cri.sandbox-id": self.id,
            "io.kubernetes.cri.sandbox-name": f"pod-{self.id}",
            "io.kubernetes.cri.sandbox-namespace": "shop",
            "io.kubernetes.cri.sandbox-uid": f"uid-{self.id}",
            "io.kubernetes.cri.container-name": name,
            **spec.get("annotations", {}),
        }
        qos = "pod" if exclusive else "burstable/pod"
        config = {
            "ociVersion": "1.0.2",
            "annotations": annotations,
            "linux": {
                "cgroupsPath": f"/kubepods/{qos}{self.id}/{name}",
                "resources": {"cpu": cpu},
            },
        }
        folder = self.host.bundles / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def end(self) -> None:
        """End it, with all that Kata keeps of it."""
        for pid in (self.pid, self.shim):
            self.host.end(pid)
        for folder in (self.host.vc / "sbs" / self.id, self.host.vc / "vm" / self.id):
            shutil.rmtree(folder, ignore_errors=True)

    def _document(self) -> Json:
        return {
            "State": "running",
            "SandboxContainer": self.id,
            "HypervisorState": {"Type": "qemu", "HotpluggedVCPUs": [], "Pid": self.pid},
            "AgentState": {"URL": self.agent_url},
            "Config": {
                "HypervisorType": "qemu",
                "ContainerConfigs": [self._entry(*one) for one in self.containers.items()],
                "HypervisorConfig": {"NumVCPUsF": len(self.vcpus)},
            },
            "PersistVersion": 2,
        }

    def _entry(self, name: str, resources: Mapping[str, Any]) -> Json:
        kind = "pod_sandbox" if name == self.id else "pod_container"
        folder = self.host.bundles / name
        return {
            "ID": name,
            "Annotations": {
                "io.katacontainers.pkg.oci.bundle_path": str(folder),
                "io.katacontainers.pkg.oci.container_type": kind,
                "io.kubernetes.cri.sandbox-id": self.id,
            },
            "Resources": resources,
            "RootFs": str(folder / "rootfs"),
        }
