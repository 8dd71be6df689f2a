"""A real kubelet on a host that only exists in files, without containers, API server or cgroups.

Run by `trace` (tests/kubelet/recording.py) as a process in its own mount, network and pid
namespaces, so that nothing of this machine is touched and nothing of it outlives the process:

- /sys/devices/system and /proc/cpuinfo are those of the wanted host: cAdvisor reads them;
- the kernel settings that a kubelet writes at its start are files of this folder;
- /var/lib, /var/log are empty: the kubelet's fixed places;
- Kubernetes' own fake container runtime answers CRI calls;
- pods come as manifests in a folder and are listed by the kubelet's own server.

Reads a JSON document from standard input (made in recording.py) and writes another one to standard
output: `ops`, a trace in the format of tests/data/oracles/README.md, `lists`, what kata-pin's
requests for the list of pods were answered, `resources` if they were wanted, and `checkpoint`, the
text of the kubelet's checkpoint at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from kata_pin.base.config.tree import Config, Paths
from kata_pin.base.cpuset import CpuSet, union
from kata_pin.base.errors import StateError
from kata_pin.cli.doctor import install
from kata_pin.peers.kubelet.pods import PodList, PodsApi, read_pod_resources
from tests.support.checkpoint import packed, replace

IMAGE: Final = "localhost/pause:1"
PORT: Final = 10255
ROOT: Final = Path("/var/lib/kubelet")
"""`root` of the stage's folder by a short path: that of a socket has at most 107 bytes."""

RUNTIME: Final = Path("/var/lib/cri.sock")
START_S: Final = 90.0
DECIDE_S: Final = 60.0

KERNEL: Final = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
"""What a kubelet writes below /proc/sys when it starts (setupKernelTunables)."""

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


class StageError(Exception):
    """The stage could not be set, or the kubelet did not answer."""


def main() -> int:
    """Play the trace of standard input; return the exit status."""
    order = json.load(sys.stdin)
    folder = Path(order["folder"])
    try:
        make_host(folder, order["cpus"])
        loopback_up()
        with running(folder, order) as kubelet:
            ops = [kubelet.step(step) for step in order["ops"]]
            lists = [pod_list(request) for request in order.get("lists", ())]
            resources = pod_resources() if order.get("resources") else {}
            checkpoint = kubelet.checkpoint_text()
    except StageError as error:
        print(f"stage: {error}", file=sys.stderr)
        return 1
    answered = {"ops": ops, "lists": lists, "resources": resources, "checkpoint": checkpoint}
    json.dump(answered, sys.stdout)
    return 0


def pod_resources() -> dict[str, Any]:
    """Return what the kubelet's pod-resources API says to kata-pin, and to doctor."""
    config = Config(paths=Paths(kubelet_state=str(ROOT / "cpu_manager_state")))
    found = asyncio.run(read_pod_resources(str(ROOT / "pod-resources" / "kubelet.sock")))
    return {
        "containers": {name: str(cpus) for name, cpus in found.containers.items()},
        "allocatable": str(found.allocatable),
        "rows": [(row.status, row.text) for row in install.pod_resources(config)],
    }


def pod_list(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the kubelet's list of pods says to kata-pin: annotations by uid, or the error.

    A request has the fields of PodList, or the `path` of the Pods API's socket.
    """
    asked = PodsApi(**request) if "path" in request else PodList(**request)
    try:
        pods = asyncio.run(asked.read())
        return {"pods": {uid: dict(spec.annotations) for uid, spec in pods.items()}}
    except StateError as error:
        return {"error": str(error)}


# ---- the host ------------------------------------------------------------------------------------


def make_host(folder: Path, cpus: list[Mapping[str, int]]) -> None:
    """Put the host of these CPUs over this machine's; only this mount namespace sees it."""
    system = folder / "system"
    write_sysfs(system, cpus)
    bind(system, Path("/sys/devices/system"))
    cpuinfo = folder / "cpuinfo"
    cpuinfo.write_text(
        "".join(
            f"processor\t: {one['cpu']}\nvendor_id\t: GenuineIntel\ncpu MHz\t\t: 2000.000\n"
            f"physical id\t: {one['socket']}\ncore id\t\t: {one['core']}\n\n"
            for one in cpus
        )
    )
    bind(cpuinfo, Path("/proc/cpuinfo"))
    for name, value in KERNEL.items():
        file = folder / "kernel" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        if Path("/proc/sys", name).exists():
            bind(file, Path("/proc/sys", name))
    for fixed in ("/var/lib", "/var/log"):
        mount("-t", "tmpfs", "tmpfs", fixed)


def write_sysfs(system: Path, cpus: list[Mapping[str, int]]) -> None:
    """Write /sys/devices/system with these CPUs: topology, last-level caches and NUMA nodes."""
    by = {
        key: {unit: [one["cpu"] for one in cpus if one[key] == unit] for unit in units}
        for key, units in ((key, {one[key] for one in cpus}) for key in ("core", "uncore", "numa"))
    }
    everything = [one["cpu"] for one in cpus]
    for one in cpus:
        cpu = system / "cpu" / f"cpu{one['cpu']}"
        put(cpu / "topology" / "core_id", one["core"])
        put(cpu / "topology" / "physical_package_id", one["socket"])
        for index, level, unit, key in ((0, 2, "core", "core"), (1, 3, "uncore", "uncore")):
            cache = cpu / "cache" / f"index{index}"
            put(cache / "id", one[key])
            put(cache / "level", level)
            put(cache / "type", "Unified")
            put(cache / "size", "1024K")
            put(cache / "shared_cpu_map", mask(by[unit][one[key]]))
    put(system / "cpu" / "online", ",".join(map(str, everything)))
    for node, members in by["numa"].items():
        put(system / "node" / f"node{node}" / "meminfo", f"Node {node} MemTotal: 67108864 kB")
        distances = " ".join("10" if other == node else "20" for other in sorted(by["numa"]))
        put(system / "node" / f"node{node}" / "distance", distances)
        put(system / "node" / f"node{node}" / "hugepages" / "hugepages-2048kB" / "nr_hugepages", 0)
        for cpu_number in members:
            link = system / "node" / f"node{node}" / f"cpu{cpu_number}"
            link.symlink_to(f"../../cpu/cpu{cpu_number}")


def put(file: Path, value: object) -> None:
    """Write one value of sysfs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{value}\n")


def mask(cpus: list[int]) -> str:
    """Return CPUs as the kernel writes a mask: words of 32 bits, the highest first."""
    bits = sum(1 << cpu for cpu in cpus)
    words = [bits >> shift & 0xFFFFFFFF for shift in range(0, bits.bit_length(), 32)]
    return ",".join(f"{word:08x}" for word in reversed(words))


def bind(source: Path, target: Path) -> None:
    """Show a file or folder in another's place."""
    mount("--bind", str(source), str(target))


def mount(*arguments: str) -> None:
    """Mount; StageError if that fails."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise StageError(f"mount {' '.join(arguments)}: {done.stderr.strip()}")


def loopback_up() -> None:
    """Bring this network namespace's loopback interface up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = b"lo".ljust(16, b"\0")
        request = struct.pack("16sh14x", name, 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", name, flags | IFF_UP))


# ---- the kubelet ---------------------------------------------------------------------------------


@contextlib.contextmanager
def running(folder: Path, order: Mapping[str, Any]) -> Iterator[Kubelet]:
    """Start the fake runtime and the kubelet; they end with this process's namespaces."""
    for name in ("manifests", "root", "logs", "plugins", "certificates"):
        (folder / name).mkdir()
    ROOT.mkdir()
    bind(folder / "root", ROOT)
    config = folder / "kubelet.json"
    config.write_text(json.dumps(configuration(folder, order)))
    command = [
        *(order["kubelet"], "--config", str(config), "--root-dir", str(ROOT)),
        *("--cert-dir", str(folder / "certificates"), "--hostname-override", "node"),
        *("--node-ip", "127.0.0.1", "--v", "2"),
    ]
    with (folder / "kubelet.log").open("wb") as log:
        cri = subprocess.Popen([order["fakecri"], str(RUNTIME), IMAGE], stdout=log, stderr=log)
        wait_until(RUNTIME.exists, START_S, "the fake runtime serves no socket")
        kubelet = Kubelet(folder, command, log, order)
        try:
            yield kubelet
        finally:
            kubelet.kill()
            cri.kill()
            cri.wait()


def configuration(folder: Path, order: Mapping[str, Any]) -> dict[str, object]:
    """Return the KubeletConfiguration: nothing but the CPU manager matters."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "staticPodPath": str(folder / "manifests"),
        "podLogsDir": str(folder / "logs"),
        "volumePluginDir": str(folder / "plugins"),
        "containerRuntimeEndpoint": f"unix://{RUNTIME}",
        "address": "127.0.0.1",
        "readOnlyPort": PORT,
        "healthzPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": order.get("client_ca", "")},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "failCgroupV1": False,
        "localStorageCapacityIsolation": False,
        "protectKernelDefaults": True,
        "makeIPTablesUtilChains": False,
        "maxPods": 1000,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "0%",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
            "imagefs.inodesFree": "0%",
        },
        "syncFrequency": "1s",
        "fileCheckFrequency": "1s",
        "featureGates": {
            "CPUManagerPolicyAlphaOptions": True,
            "CPUManagerPolicyBetaOptions": True,
            **dict.fromkeys(order.get("gates", ()), True),
        },
        "cpuManagerPolicy": "static",
        "cpuManagerPolicyOptions": order["options"],
        "cpuManagerReconcilePeriod": "500ms",
        "reservedSystemCPUs": order["reserved"],
        "topologyManagerPolicy": order["topology_manager"],
        "topologyManagerScope": order["scope"],
    }


class Kubelet:
    """A running kubelet: pods go in as manifests, decisions come out of its list and checkpoint."""

    def __init__(
        self, folder: Path, command: Sequence[str], log: BinaryIO, order: Mapping[str, Any]
    ) -> None:
        self._folder = folder
        self._command = command
        self._log = log
        self._manifests: dict[str, Path] = {}
        self._cpus = CpuSet(one["cpu"] for one in order["cpus"])
        if order["options"].get("strict-cpu-reservation") == "true":
            self._cpus -= CpuSet.parse(order["reserved"])
        self._process = self._start()
        self.wait(self.serves, START_S, "the kubelet does not start")

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def restart(self, entries: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        """Kill it and start it again; return its checkpoint when it knows its pods again.

        With `entries` these are in the checkpoint that it finds, instead of those of all pods.
        """
        self.kill()
        if entries:
            data = json.loads(json.loads(self.checkpoint_text())["data"])
            held = union(CpuSet.parse(cpus) for of in entries.values() for cpus in of.values())
            data |= {"entries": entries, "defaultCpuSet": str(self._cpus - held)}
            replace(self._folder / "root" / "cpu_manager_state", packed(data))
        self._process = self._start()
        answer: dict[str, Any] = {}

        def back() -> bool:
            return len(self.pods() or []) == len(self._manifests) and self.settled(answer)

        self.wait(back, START_S, "the kubelet does not start again")
        return answer

    def step(self, step: Mapping[str, Any]) -> dict[str, Any]:
        """Play one step; return it with the kubelet's answer and its checkpoint after it."""
        if step["op"] == "restart":
            return {**step, **self.restart(step.get("entries", {}))}
        pod, gone = step["pod"], step.get("old", "")
        answer: dict[str, Any] = {}
        if step["op"] == "del":
            self._manifests.pop(pod).unlink()
            self.wait(lambda: self.settled(answer, without=pod), DECIDE_S, f"{pod} does not go")
            return {**step, **answer}
        manifest = self._manifests.pop(gone, self._folder / "manifests" / f"{pod}.json")
        self._manifests[pod] = manifest
        written = manifest.with_name(f".{manifest.name}")
        written.write_text(json.dumps(pod_manifest(manifest.stem, step)))
        written.rename(manifest)

        def decided() -> bool:
            answer.update(self.answer(pod))
            return bool(answer) and self.settled(answer, without=gone)

        self.wait(decided, DECIDE_S, f"{pod} is not decided")
        return {**step, **answer}

    def wait(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Wait for a condition; StageError with the end of the log if it does not come."""

        def met() -> bool:
            if self._process.poll() is not None:
                raise StageError("the kubelet ended" + self._said())
            return condition()

        wait_until(met, seconds, otherwise, self._said)

    def serves(self) -> bool:
        """Return whether it lists pods and has written its first checkpoint."""
        return self.pods() is not None and bool(self.checkpoint_text())

    def pods(self) -> list[dict[str, Any]] | None:
        """Return the pods that it lists; None while it serves nothing."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/pods", timeout=10) as reply:
                listed = json.load(reply).get("items")
        except OSError:
            return None
        return listed or []

    def answer(self, pod: str) -> dict[str, str]:
        """Return whether it admitted a pod, and why not; nothing while it has not decided.

        Its list says at once which pods failed. It remembers the resources of those that it
        admits, also while a static pod waits until the one in whose place it comes has ended.
        """
        for one in self.pods() or []:
            status = one.get("status", {})
            hashed = one["metadata"]["annotations"].get("kubernetes.io/config.hash")
            if hashed == pod and status.get("phase") == "Failed":
                return {"result": "refused", "reason": status.get("message", "")}
        if pod in self._read("allocated_pods_state"):
            return {"result": "ok"}
        return {}

    def checkpoint(self) -> dict[str, Any]:
        """Return the shared pool and the entries of its checkpoint, and those of pods if any."""
        document = json.loads(self.checkpoint_text())
        content = json.loads(document["data"]) if "data" in document else document
        pods = {uid: entry["cpuSet"] for uid, entry in content.get("podEntries", {}).items()}
        return {
            "default": content["defaultCpuSet"],
            "entries": content.get("entries") or {},
            **({"pods": pods} if pods else {}),
        }

    def checkpoint_text(self) -> str:
        """Return its checkpoint as it is in the file, empty without one."""
        return self._read("cpu_manager_state")

    def settled(self, into: dict[str, Any], without: str = "") -> bool:
        """Return whether its checkpoint is whole, and has nothing of a pod that went; keep it.

        A change takes two writes, and between them some CPUs are nobody's.
        """
        state = self.checkpoint()
        held = [CpuSet.parse(cpus) for of in state["entries"].values() for cpus in of.values()]
        held += map(CpuSet.parse, state.get("pods", {}).values())
        known = CpuSet.parse(state["default"]) | union(held)
        whole = known == self._cpus and without not in state["entries"]
        if whole:
            into.update(state)
        return whole

    def _read(self, name: str) -> str:
        file = self._folder / "root" / name
        return file.read_text() if file.exists() else ""

    def _said(self) -> str:
        lines = (self._folder / "kubelet.log").read_text(errors="replace").splitlines()
        return "; its log ends:\n" + "\n".join(lines[-30:])


def pod_manifest(name: str, step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the static pod of an `add` or `change` step."""
    containers: dict[str, list[dict[str, Any]]] = {"initContainers": [], "containers": []}
    for one in step["containers"]:
        cpu = {"request_m": "requests", "limit_m": "limits"}
        resources = {kind: {"cpu": f"{one[key]}m"} for key, kind in cpu.items() if one[key]}
        for kind, memory in (
            ("requests", "1Mi"),
            ("limits", "1Mi" if one["memory_equal"] else "2Mi"),
        ):
            resources.setdefault(kind, {})["memory"] = memory
        container = {
            "name": one["name"],
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "resources": resources,
        }
        if one["role"] == "sidecar":
            container["restartPolicy"] = "Always"
        kind = "containers" if one["role"] == "app" else "initContainers"
        containers[kind].append(container)
    whole = {"cpu": f"{step.get('pod_m', 0)}m", "memory": "64Mi"}
    pod = {"resources": {"requests": whole, "limits": whole}} if "pod_m" in step else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "kubelet",
            "uid": step["pod"],
            "annotations": step.get("annotations", {}),
        },
        "spec": {
            "hostNetwork": True,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **pod,
            **{kind: members for kind, members in containers.items() if members},
        },
    }


def wait_until(
    condition: Callable[[], bool], seconds: float, otherwise: str, said: Callable[[], str] = str
) -> None:
    """Wait for a condition; StageError if it does not come within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise StageError(f"{otherwise} within {seconds:.0f} s{said()}")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
