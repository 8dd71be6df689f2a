"""minikata is as awkward as Kata: VM, hooks, files, cgroups, against recordings of 3.21 and 4.1."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.minikata import sizing
from tests.support import qemu
from tests.support.daemon import private_node
from tests.support.hookdump import dumping_hooks, dumps
from tests.support.hooks import COMMAND, PATIENT
from tests.support.katalike import KataDirs
from tests.support.minikata import Minikata, minikata_node, vcpu_threads
from tests.support.ocirun import OciError
from tests.support.qemu import Accelerator
from tests.support.waiting import wait_for

# `alone`: its QEMU is where Kata has it, so a daemon of a test beside it would pin it
pytestmark = [pytest.mark.qemu, pytest.mark.root, pytest.mark.alone]

RECORDED = Path(__file__).resolve().parents[1] / "data/kata-3.21"
PHASES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
PATH = {"env": ["PATH=/usr/bin:/bin", "HOOKENV=x"]}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets go below it."""
    path = Path(tempfile.mkdtemp(prefix="mk"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def dirs(folder: Path) -> KataDirs:
    return KataDirs.below(folder)


@pytest.fixture
def kata(folder: Path, dirs: KataDirs) -> Iterator[Minikata]:
    with minikata_node(folder, dirs, default_vcpus=2, default_maxvcpus=16) as node:
        yield node


@pytest.fixture
def dumped(folder: Path) -> Path:
    """Where the dumping hooks write."""
    path = folder / "dumps"
    path.mkdir()
    return path


def _recorded(name: str) -> Any:
    return json.loads((RECORDED / name).read_text())


def _cpuset(kata: Minikata, sandbox: str) -> str:
    """Return the CPUs written to a sandbox's cgroup, version 1 or 2."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    root = Path("/sys/fs/cgroup") if unified else Path("/sys/fs/cgroup/cpuset")
    return (root / f"{kata.cgroup[1:]}/kata_{sandbox}/cpuset.cpus").read_text().strip()


def _kvm_only() -> None:
    if qemu.accelerator() is not Accelerator.KVM:
        pytest.skip("vCPU threads are told apart by KVM here")


def _wait_vcpus(pid: int, expected: set[int]) -> None:
    """Wait until the vCPU threads are these; one that is on a CPU cannot be told for a moment."""
    wait_for(lambda: set(vcpu_threads(pid)) == expected, f"vCPUs {expected}")


def test_vcpus_come_and_go_as_under_kata(kata: Minikata) -> None:
    """Sizes and indexes are those recorded: 2 boot, descending hotplug, unplug by a quota."""
    _kvm_only()
    with kata.container("p1", "p1", cpus="0-1") as pod:
        pod.start()
        pid = kata.qemu_pid("p1")
        _wait_vcpus(pid, {0, 1, 15, 14})  # the pod's cpuset counts, without quota
        with kata.container("c1", "p1", cpus="1", quota=100000, period=100000) as app:
            app.start()
            _wait_vcpus(pid, {0, 1, 15})  # a quota: cpusets count no more
            app.update_resources({"quota": 300000})
            _wait_vcpus(pid, {0, 1, 15, 14, 13})
            app.stop()
            _wait_vcpus(pid, {0, 1, 15, 14, 13})  # a deletion resizes nothing
        with kata.container("c2", "p1", cpus="0"):
            _wait_vcpus(pid, {0, 1, 15, 14, 13})


def test_cpuset_is_the_union_and_leaves_with_a_deletion(kata: Minikata) -> None:
    """The cpuset is written on create, update and delete; a stopped container still counts."""
    with kata.container("p1", "p1") as pod:
        pod.start()
        everything = _cpuset(kata, "p1")
        with kata.container("c1", "p1", cpus="1") as one, kata.container("c2", "p1", cpus="0"):
            assert _cpuset(kata, "p1") == "0-1"
            one.update("0")
            assert _cpuset(kata, "p1") == "0"
            one.update("1")
            one.kill()
            wait_for(lambda: one.status == "stopped", "the container to stop")
            assert _cpuset(kata, "p1") == "0-1"
            one.delete()
            assert _cpuset(kata, "p1") == "0"
        assert _cpuset(kata, "p1") == "0"  # an empty union leaves what there was
    assert everything in {"", "0-1"}


def test_threads_are_in_the_cgroups_that_kata_uses(kata: Minikata) -> None:
    """kata_<id> has the vCPUs, on version 2 all of QEMU; the service is in /kata_overhead."""
    with kata.container("p1", "p1") as pod:
        pod.start()
        pid = kata.qemu_pid("p1")
        service = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        assert "/kata_overhead/p1" in Path(f"/proc/{service}/cgroup").read_text()
        inside = {
            int(task.name)
            for task in Path(f"/proc/{pid}/task").iterdir()
            if f"{kata.cgroup}/kata_p1" in (task / "cgroup").read_text()
        }
        whole = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        if whole:
            assert pid in inside
        else:
            _kvm_only()
            assert inside == set(_two_vcpus(pid).values())


def test_hooks_get_what_kata_3_21_gave(kata: Minikata, dumped: Path) -> None:
    """Every hook of a pod and its container: phases in order, and each key as it was recorded."""
    hooks = dumping_hooks(dumped, PHASES, kata.dirs.vc / "vm/p1/qmp.sock", **PATH)
    names = {"io.kubernetes.cri.container-name": "app"}
    with kata.container("p1", "p1", hooks=hooks, cpus="0") as pod:
        pod.start()
        pid = kata.qemu_pid("p1")
        with kata.container("p1c1", "p1", hooks=hooks, annotations=names, cpus="0") as app:
            app.start()
            app.stop()
        pod.stop()
    given = dumps(dumped)
    assert [(Path(one["state"]["bundle"]).name, one["hook"]) for one in given] == [
        ("p1", "prestart"),
        ("p1", "createRuntime"),
        ("p1", "poststart"),
        ("p1c1", "prestart"),
        ("p1c1", "createRuntime"),
        ("p1c1", "poststart"),
        ("p1c1", "poststop"),
        ("p1", "poststop"),
    ]
    for one in given:
        bundle = Path(one["state"]["bundle"])
        expected = _recorded_state(one["hook"], bundle, kata.dirs.bundles)
        assert json.dumps({**one["state"], "pid": 0}) == json.dumps({**expected, "pid": 0})
        assert one["env"] == {"PATH": "/usr/bin:/bin", "HOOKENV": "x", "LC_CTYPE": "C.UTF-8"}
        assert one["cwd"] == str(kata.dirs.bundles / "p1")
        assert all(target.startswith("pipe:") for target in one["fds"].values())
        assert any(line.endswith("/kata_overhead/p1") for line in one["cgroup"])
        if one["hook"] in {"prestart", "createRuntime"}:
            assert one["state"]["pid"] == pid
        else:
            assert one["state"]["pid"] not in {pid, one["ppid"]}
    greeted = [one["qmp_greets"] for one in given]
    assert greeted == [True, True, *[False] * 6]  # free in the sandbox's createRuntime only


def _recorded_state(phase: str, bundle: Path, bundles: Path) -> dict[str, Any]:
    """Return the recorded state for a hook, with our folder and without its network namespace."""
    first = "p1c1" if phase == "poststop" else "p1"  # recorded in the order of the calls
    folder = "hooks-after-delete" if phase == "poststop" else "sandbox-and-container/hooks2"
    number = "" if bundle.name == first else ".2"
    text: str = _recorded(f"{folder}/{phase}{number}.json")["stdin"]
    theirs = str(Path(json.loads(text)["bundle"]).parent)
    state: dict[str, Any] = json.loads(text.replace(theirs, str(bundles)))
    state["annotations"].pop("nerdctl/network-namespace", None)
    return state


def test_hooks_of_a_container_run_in_the_pods_network(kata: Minikata, dumped: Path) -> None:
    """QEMU, container hooks and poststart are in the pod's namespace, the others in the host's."""
    host = os.readlink("/proc/self/ns/net")
    hooks = dumping_hooks(dumped, PHASES)
    with subprocess.Popen(["unshare", "--net", "sleep", "60"]) as other:
        try:
            netns = f"/proc/{other.pid}/ns/net"
            wait_for(lambda: os.readlink(netns) != host, "a network namespace")
            pods = os.readlink(netns)
            with kata.container("p1", "p1", hooks=hooks, netns=netns) as pod:
                assert os.readlink(f"/proc/{kata.qemu_pid('p1')}/ns/net") == pods
                assert kata.persist("p1")["Network"]["NetworkID"] == netns
                pod.start()
                with kata.container("c1", "p1", hooks=hooks) as app:
                    app.start()
                    app.stop()
                pod.stop()
        finally:
            other.kill()
    places = [(Path(one["state"]["bundle"]).name, one["hook"]) for one in dumps(dumped)]
    inside = [one["netns"] == pods for one in dumps(dumped)]
    assert dict(zip(places, inside, strict=True)) == {
        ("p1", "prestart"): False,
        ("p1", "createRuntime"): False,
        ("p1", "poststart"): True,
        ("c1", "prestart"): True,
        ("c1", "createRuntime"): True,
        ("c1", "poststart"): True,
        ("c1", "poststop"): False,
        ("p1", "poststop"): False,
    }
    assert dumps(dumped)[0]["state"]["annotations"]["nerdctl/network-namespace"] == netns


def test_persist_json_has_every_key_of_katas(kata: Minikata) -> None:
    """persist.json has the recorded keys, no other, and this sandbox's values; it is truncated."""
    with kata.container("p1", "p1", cpus="0") as pod:
        pod.start()
        path = kata.dirs.vc / "sbs/p1/persist.json"
        inode = path.stat().st_ino
        names = {"io.kubernetes.cri.container-name": "app"}
        cpu: dict[str, Any] = {"quota": 200000, "period": 100000, "cpus": "0-1", "mems": "0"}
        with kata.container("p1c1", "p1", annotations=names, **cpu):
            ours = kata.persist("p1")
            theirs = _recorded("sandbox-and-container/run_vc_sbs_p1_persist.json")
            assert path.stat().st_ino == inode
            assert path.stat().st_mode & 0o777 == 0o600
            app = ours["Config"]["ContainerConfigs"][1]
            assert app["Resources"]["cpu"] == cpu
            for document in (ours, theirs):
                for one in document["Config"]["ContainerConfigs"]:
                    one["Annotations"].pop("nerdctl/network-namespace", None)
                    one["Resources"] = {}
            assert _keys(ours) == _keys(theirs)
            assert ours["HypervisorState"]["Pid"] == kata.qemu_pid("p1")
            assert ours["HypervisorState"]["HotpluggedVCPUs"] == [{"ID": "cpu-0"}, {"ID": "cpu-1"}]
            assert ours["State"] == "running"
            assert ours["SandboxCgroupPath"] == f"{kata.cgroup}/kata_p1"


def _keys(value: Any) -> Any:
    """Return the shape of a JSON document: keys and types of values, nothing of the values."""
    if isinstance(value, dict):
        return {key: _keys(value[key]) for key in value}
    if isinstance(value, list):
        return [_keys(one) for one in value if not isinstance(one, str)]
    return type(value).__name__


def test_command_line_is_katas(folder: Path, dirs: KataDirs) -> None:
    """QEMU has Kata's arguments in Kata's order, but for devices and a guest that are not here."""
    with (
        minikata_node(
            folder, dirs, default_vcpus=2, default_maxvcpus=16, enable_iothreads=True
        ) as kata,
        kata.container("p1", "p1"),
    ):
        pid = kata.qemu_pid("p1")
        ours = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
        comms = {task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/comm")}
        log = kata.log("p1")
    recorded = (RECORDED / "sandbox/qemu-cmdline.txt").read_text().splitlines()
    absent = {"-kernel", "-initrd", "-append"} | ({"vhostfd"} if "no vhost-vsock" in log else set())
    expected = [word for word in _shape(recorded[1:]) if word not in absent]
    if "no vhost-net" in log:
        expected = [word.replace("vhost,vhostfds,", "") for word in expected]
    found = [word.removesuffix(",-arch-capabilities") for word in _shape(ours) if word != "-bios"]
    if qemu.accelerator() is not Accelerator.KVM:  # what Kata gives KVM alone
        expected = [word.replace("-cpu,host,pmu", "-cpu,max") for word in expected]
        expected = [word for word in expected if not word.startswith("-global,kvm-")]
    assert [word for word in found if word] == [word for word in expected if word]
    assert ours[ours.index("-smp") + 1] == "2,cores=1,threads=1,sockets=16,maxcpus=16"
    assert comms <= {"qemu-system-x86\n", "kvm-nx-lpage-re\n", f"vhost-{pid}\n"}


def test_sizes_are_those_of_katas_functions() -> None:
    """minikata counts as Kata 4.1 does (tests/data/kata-sizing)."""
    folder = RECORDED.with_name("kata-sizing")
    pods = json.loads((folder / "pods.json").read_text())
    rows = [row.split("\t") for row in (folder / "answers.tsv").read_text().splitlines()[1:]]
    counted = 0
    for runtime, version, way, default, overhead, most, pod, boot, running, _ in rows:
        sandbox = dict.fromkeys(("quota", "period", "shares", "memory"), 0) | pods[pod]["sandbox"]
        if version != "4.1.0" or (way, runtime) == ("dynamic", "runtime-rs"):
            continue
        counted += 1
        if way == "static":
            count = sizing.static_go if runtime == "go" else sizing.static_rs
            assert count(float(default), float(overhead), sandbox) == int(boot), (runtime, pod)
        else:
            wanted = sizing.wanted_go(float(default), pods[pod]["containers"])
            assert max(int(boot), min(wanted, int(most))) == int(running), pod
    assert counted > 100


POD_SIZE = {
    "io.kubernetes.cri.sandbox-cpu-quota": "250000",
    "io.kubernetes.cri.sandbox-cpu-period": "100000",
    "io.kubernetes.cri.sandbox-memory": str(320 << 20),
}
"""The pod that was recorded with runtime-rs 4.1."""


def test_runtime_rs_is_as_recorded(folder: Path, dirs: KataDirs) -> None:
    """Kata 4.1: the command line, vCPUs before any container, cgroups and every key of its state.

    All of the sandbox is in the pod's cgroup, and an update of a cpuset plugs nothing.
    """
    recorded = RECORDED.with_name("kata-4.1")
    cpu: dict[str, Any] = {"cpus": "1", "quota": 200000, "period": 100000}
    with (
        minikata_node(
            folder, dirs, runtime="rs", enable_iothreads=True, default_memory=352
        ) as kata,
        kata.container("p1", "p1", annotations=POD_SIZE),
        kata.container("c1", "p1", **cpu) as app,
    ):
        app.start()
        app.update("0")
        pid = json.loads(app.state)["pid"]
        ours = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
        groups = {Path(f"/proc/{one}/cgroup").read_text() for one in kata.processes()[:3]}
        state = json.loads((dirs.kata / "p1/state.json").read_text())
        comms = {task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/comm")}
        log = kata.log("p1")
    text = (recorded / "qemu-cmdline.txt").read_text()
    theirs = re.sub("[0-9a-f]{64}", "p1", text).splitlines()[1:]
    absent = {"-kernel", "-initrd", "-append"} | ({"vhostfd"} if "no vhost-vsock" in log else set())
    expected = [word for word in _shape(theirs) if word not in absent]
    if "no vhost-net" in log:
        expected = [word.replace("vhost,vhostfds,", "") for word in expected]
    found = [word.removesuffix(",-arch-capabilities") for word in _shape(ours) if word != "-bios"]
    if qemu.accelerator() is not Accelerator.KVM:
        expected = [word.replace("-cpu,host,pmu", "-cpu,max") for word in expected]
        expected = [word.replace("kernel_irqchip,", "") for word in expected]
    assert [word for word in found if word] == [word for word in expected if word]
    assert ours[ours.index("-smp") + 1] == theirs[theirs.index("-smp") + 1] == "3"
    assert comms <= {"qemu-system-x86\n", "kvm-nx-lpage-re\n", f"vhost-{pid}\n"}
    assert all(f"{kata.cgroup}/p1\n" in group for group in groups)
    assert len(groups) == 1
    assert _keys(state) == _keys(json.loads((recorded / "state.json").read_text()))
    assert state["resource"]["cgroup_state"]["path"] == f"{kata.cgroup[1:]}/p1"


def _shape(argv: list[str]) -> list[str]:
    """Return each option with its argument's first word and the names of its properties."""
    shape = []
    for position, word in enumerate(argv):
        if not word.startswith("-"):
            continue
        argument = argv[position + 1] if position + 1 < len(argv) else ""
        if word in {"-uuid", "-pidfile", "-kernel", "-initrd", "-append", "-bios"}:
            shape.append(word)
        elif "vhost-vsock" in argument:
            shape.append("vhostfd")
        elif not argument.startswith("-"):
            parts = argument.split(",")
            names = [part.partition("=")[0] for part in parts[1:]]
            shape.append(",".join([word, parts[0].partition("=")[0], *names]))
        else:
            shape.append(word)
    return shape


def test_qmp_is_held_but_the_window(kata: Minikata) -> None:
    """After creation a second client connects and gets no greeting."""
    with kata.container("p1", "p1"), socket.socket(socket.AF_UNIX) as monitor:
        monitor.settimeout(0.3)
        monitor.connect(str(kata.dirs.vc / "vm/p1/qmp.sock"))
        with pytest.raises(TimeoutError):
            monitor.recv(1)


def test_failing_hook_fails_the_sandbox_and_leaves_nothing(kata: Minikata) -> None:
    """Go: a sandbox whose createRuntime fails has no VM, no files and no process left."""
    failing = {"createRuntime": [{"path": "/bin/false", "args": ["false"]}]}
    with (
        pytest.raises(OciError, match="hook /bin/false: exit status 1"),
        kata.container("p1", "p1", hooks=failing),
    ):
        pass
    assert not (kata.dirs.vc / "vm/p1").exists()
    assert not (kata.root / "p1").exists()


def test_failing_hook_leaves_the_container_in_persist_json(kata: Minikata) -> None:
    """Go: a container whose hook fails is not rolled back: Kata keeps counting its CPUs."""
    slow = {"createRuntime": [{"path": "/bin/sleep", "args": ["sleep", "60"], "timeout": 1}]}
    with kata.container("p1", "p1") as pod:
        pod.start()
        with pytest.raises(OciError, match="timeout"), kata.container("c1", "p1", hooks=slow):
            pass
        ids = [one["ID"] for one in kata.persist("p1")["Config"]["ContainerConfigs"]]
        assert ids == ["p1", "c1"]
        assert not (kata.root / "c1").exists()


def test_hook_without_env_inherits_in_go_only(
    folder: Path, dirs: KataDirs, dumped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Go: no `env` is the shim's own environment. runtime-rs: an empty one."""
    monkeypatch.setenv("OF_THE_SHIM", "yes")
    hooks = dumping_hooks(dumped, ["createRuntime"])
    with minikata_node(folder, dirs) as kata:
        for name, runtime in (("p1", "go"), ("p2", "rs")):
            with kata.container(name, name, hooks=hooks, annotations={"minikata.runtime": runtime}):
                pass
    assert ["OF_THE_SHIM" in one["env"] for one in dumps(dumped)] == [True, False]


def test_runtime_rs_hooks(folder: Path, dirs: KataDirs, dumped: Path) -> None:
    """runtime-rs: whole state, QEMU's pid, QMP held; createContainer; failures only logged."""
    phases = [phase for phase in PHASES if phase != "startContainer"]
    qmp = dirs.bundles / "p1/qmp.sock"
    hooks = dumping_hooks(dumped, phases, qmp)
    for listed in hooks.values():
        listed += [listed[0], {"path": "/bin/false"}]  # a twin runs once, a failure is logged
    with minikata_node(folder, dirs, runtime="rs", default_vcpus=1) as kata:
        with kata.container("p1", "p1", hooks=hooks) as pod:
            pod.start()
            assert qmp.is_socket()
            assert (
                json.loads((dirs.kata / "p1/state.json").read_text())["hypervisor"]["pid"] is None
            )
            with kata.container("c1", "p1", hooks=hooks) as app:
                app.start()
                pid = json.loads(app.state)["pid"]
                app.stop()
            pod.stop()
        assert "/bin/false" in kata.log("p1")
    given = [(one["state"]["id"], one["hook"], one["state"]["status"]) for one in dumps(dumped)]
    assert given == [
        ("p1", "prestart", "creating"),
        ("p1", "createRuntime", "creating"),
        ("p1", "createContainer", "creating"),
        ("p1", "poststart", "running"),
        ("c1", "createContainer", "creating"),
        ("c1", "poststart", "running"),
        ("c1", "poststop", "stopped"),
        ("p1", "poststop", "stopped"),
    ]
    assert {one["state"]["pid"] for one in dumps(dumped)} == {pid}
    assert not any(one["qmp_greets"] for one in dumps(dumped))


def test_own_pinning_of_rs_and_the_panic_of_go(folder: Path, dirs: KataDirs) -> None:
    """enable_vcpus_pinning: rs counts vCPUs through; the Go shim dies and leaves QEMU an orphan."""
    _kvm_only()
    settings = {"enable_vcpus_pinning": True, "default_maxvcpus": 8}
    settings["static_sandbox_resource_mgmt"] = False
    with minikata_node(folder, dirs, **settings) as kata:
        rs = {"minikata.runtime": "rs"}
        with kata.container("p1", "p1", annotations=rs, cpus="0-1") as pod:
            pid = json.loads(pod.state)["pid"]
            affinities = {n: os.sched_getaffinity(t) for n, t in _two_vcpus(pid).items()}
            assert affinities == {0: {0}, 7: {1}}
        with kata.container("p2", "p2"):
            pid = kata.qemu_pid("p2")
            with (
                pytest.raises(
                    OciError, match=r"(?s)closed.*panic.*index out of range .7. with length 2"
                ),
                kata.container("c2", "p2", cpus="0-1", quota=100000, period=100000),
            ):
                pass
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
            assert Path(f"/proc/{parent}/comm").read_text() != "containerd-shim\n"
            assert os.sched_getaffinity(vcpu_threads(pid)[0]) == {0}


def test_dead_service_leaves_an_orphan(kata: Minikata) -> None:
    """Kill the service: QEMU lives on, the pod's containers end, and can be deleted."""
    with kata.container("p1", "p1") as pod, kata.container("c1", "p1") as app:
        service, virtiofsd, vmm, *placeholders = kata.processes()
        assert vmm == kata.qemu_pid("p1")
        os.kill(service, signal.SIGKILL)
        wait_for(lambda: not any(map(_runs, placeholders)), "the placeholders to end")
        app.delete()
        pod.delete()
        assert not (kata.root / "p1").exists()
        assert _runs(vmm)
        assert _runs(virtiofsd)


def test_purge_ends_everything(folder: Path, dirs: KataDirs) -> None:
    """After purge no process, no link and no cgroup is left, whatever was running."""
    with minikata_node(folder, dirs) as kata:
        pod = kata.container("p1", "p1")
        pod.__enter__()
        processes = kata.processes()
        assert len(processes) == 4  # the service, virtiofsd, QEMU, the placeholder
    assert not any(_runs(pid) for pid in processes)
    assert not kata.root.exists()
    assert not list(Path("/sys/fs/cgroup").glob(f"**{kata.cgroup}"))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def test_daemon_pins_a_minikata_pod(folder: Path) -> None:
    """End to end: installed hooks, the real daemon, one exclusive and one shared container."""
    _kvm_only()
    with (
        private_node(audit={"affinity_s": 0.5, "deep_s": 1}) as node,
        minikata_node(folder, node.dirs, default_vcpus=1, default_maxvcpus=8) as kata,
    ):
        node.start()
        hooks = {
            phase: [_hook(phase, node.runtime_dir)]
            for phase in ("createRuntime", "poststart", "poststop")
        }
        name = node.id_of("p1")
        exclusive: dict[str, Any] = {"cpus": "1", "quota": 100000, "period": 100000}
        with (
            kata.container(name, name, hooks=hooks) as pod,
            kata.container("app", name, hooks=hooks, **exclusive) as app,
            kata.container("log", name, hooks=hooks, cpus="0", shares=102) as log,
        ):
            for one in (pod, app, log):
                one.start()
            node.wait_state("p1", "ok")
            pid = kata.qemu_pid(name)
            vcpus = _two_vcpus(pid)
            assert set(vcpus) == {0, 7}
            for task in Path(f"/proc/{pid}/task").iterdir():
                wanted = {1} if int(task.name) == vcpus[7] else {0}
                assert os.sched_getaffinity(int(task.name)) == wanted, task
            app.stop()
            log.update("1")  # no hook runs; Kata rewrites its state
            wait_for(lambda: _masks(pid) == {(1,)}, "the update to be followed")


@pytest.mark.parametrize("sized", [False, True])
def test_daemon_beside_the_own_pinning_of_rs(folder: Path, *, sized: bool) -> None:
    """runtime-rs keeps the vCPUs while there are as many as CPUs: not where the pod has a size.

    Its static sizing gives one more then, and kata-pin pins them, as after an update to fewer CPUs.
    """
    _kvm_only()
    hooks_of = ("createContainer", "createRuntime", "poststart", "poststop")
    size = {key: value for key, value in POD_SIZE.items() if "cpu" in key} if sized else {}
    with (
        private_node(audit={"affinity_s": 0.5, "deep_s": 1}) as node,
        minikata_node(
            folder, node.dirs, runtime="rs", default_vcpus=2, enable_vcpus_pinning=True
        ) as kata,
    ):
        node.start()
        hooks = {phase: [_hook(phase, node.runtime_dir)] for phase in hooks_of}
        name = node.id_of("p1")
        exclusive: dict[str, Any] = {"cpus": "0-1", "quota": 200000, "period": 100000}
        with (
            kata.container(name, name, hooks=hooks, annotations=size) as pod,
            kata.container("app", name, hooks=hooks, **exclusive) as app,
        ):
            pod.start()
            app.start()
            pid = json.loads(app.state)["pid"]
            count = 3 if sized else 2
            vcpus = wait_for(lambda: _vcpus_of(pid, count), f"{count} vCPU threads")

            def placed() -> bool:
                masks = sorted(sorted(os.sched_getaffinity(tid)) for tid in vcpus.values())
                return masks == ([[0], [0, 1], [1]] if sized else [[0], [1]])

            wait_for(placed, "the vCPUs to be paired")
            states = {"ok"} if sized else {"unmanaged"}
            wait_for(lambda: _vcpu_states(node.wait_state("p1", "ok")) == states, "it to be shown")
            codes = {note["code"] for note in node.wait_state("p1", "ok")["notes"]}
            assert ("kata-pins-vcpus" in codes) is not sized
            app.update("1")
            wait_for(lambda: _masks(pid) == {(1,)}, "the update to be followed")
            wait_for(lambda: _vcpu_states(node.sandboxes()["p1"]) == {"ok"}, "vCPUs pinned by us")


def _vcpu_states(shown: dict[str, Any]) -> set[str]:
    return {one["state"] for one in shown["threads"] if one["role"] == "vcpu"}


def _masks(pid: int) -> set[tuple[int, ...]]:
    tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return {tuple(sorted(os.sched_getaffinity(tid))) for tid in tids}


def _hook(phase: str, runtime_dir: Path) -> dict[str, Any]:
    arguments = [*COMMAND, phase, f"--runtime-dir={runtime_dir}", *PATIENT]
    return {"path": COMMAND[0], "args": arguments}


def _two_vcpus(pid: int) -> dict[int, int]:
    """Return thread by vCPU once both can be told."""

    return wait_for(lambda: _vcpus_of(pid, 2), "two vCPU threads")


def _vcpus_of(pid: int, count: int) -> dict[int, int] | None:
    found = vcpu_threads(pid)
    return found if len(found) == count else None
