"""Every file recorded from real Kata 1.13, 3.21 and 3.32 passes through the parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.values import ContainerKind, ContainerState
from kata_pin.linux import proc
from kata_pin.peers import kata, qemu, vmm_cmdline
from kata_pin.peers.kubelet.checkpoint import parse_checkpoint
from kata_pin.peers.oci import OciState, Phase, parse_config, parse_state, record
from kata_pin.peers.qemu import check_answers
from tests.support import recordings
from tests.support.recordings import DATA, FOLDERS, files, label

HOOKS = files("**/hooks*/*.json")
CMDLINES = files("**/qemu-cmdline.txt")
THREADS = files("**/qemu-threads.txt")
STATUSES = files("**/qemu-status-cgroup-fd.txt")
BUNDLES = files("**/bundle-*.json")
CHECKPOINTS = files("**/cpu_manager_state")
SANDBOXES = [path for path in files("**/run_vc_sbs_*_persist.json") if path.name.count("_") == 4]
CONTAINERS = [path for path in files("**/run_vc_sbs_*_persist.json") if path.name.count("_") == 5]
QMP = files("**/qmp.txt")
PIDS = files("**/run_vc_vm_*_pid")
PROCESSES = files("**/processes.txt")
# Laid out as on a host by tests/support/recordedpod.py, and read there by what reads a host.
PLAYED = [*files("proc/*/*"), *files("kvm-debugfs.txt"), *files("state.json")]
PLAYED += files("masks-over-update.txt")

# Logs and listings for people: no parser reads such a thing.
PROSE = {"README.md", "cgroups.txt", "cgroups2.txt", "cgroup-dirs.txt", "run-vc-tree.txt"}
PROSE |= {"hooks-summary.txt", "update-and-teardown.txt", "runB-enable_vcpus_pinning.txt"}
PROSE |= {"qmp-held-by-other-client.txt", "cnproc.txt", "thread-identification.txt", "run.txt"}
PROSE |= {"debugfs-vcpus.txt", "kubelet-and-manifest.txt", "masks-over-time.txt"}

KUBELET = "kata-3.32-kubelet-1.34"
POD = "f6b64317a3356ab7214fbf39c6c9347de215430079b0d9706c8df35e60600922"
"""The pod sandbox of the recording with a kubelet; the others are called p1, p2 and b1."""
RUST_POD = "6bef26cf51cfeba8ae338e038ce8367c1c19fd56e2a79ccd3f1f19ae20d446cc"
"""That of the recording of runtime-rs."""


def each(paths: Iterable[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", [pytest.param(path, id=label(path)) for path in paths])


def of_kata_3(path: Path) -> bool:
    """Whether Kata 3 made it: with KVM and virtiofsd."""
    return not {"kata-3.21", KUBELET}.isdisjoint(path.parts)


def test_no_recording_is_left_out() -> None:
    """Each recorded file is parsed below, or is known to be a log for people."""
    everything = {path for folder in FOLDERS for path in (DATA / folder).rglob("*.*")}
    everything |= set(PIDS)
    parsed = {*HOOKS, *CMDLINES, *THREADS, *STATUSES, *SANDBOXES, *CONTAINERS}
    parsed |= {*QMP, *PIDS, *PROCESSES, *BUNDLES, *CHECKPOINTS, *PLAYED}
    left = {path for path in everything - parsed if path.is_file() and path.name not in PROSE}
    assert left == set()
    counts = (len(HOOKS), len(CMDLINES), len(THREADS), len(SANDBOXES), len(CONTAINERS))
    assert counts == (35, 12, 11, 11, 14)


@each(HOOKS)
def test_hook_input(path: Path) -> None:
    """Each stdin names its container, sandbox, state, cpuset and quota."""
    given = recordings.hook_input(path)
    assert given.config is not None
    config = parse_config(given.config)
    container = record(Phase(given.phase), parse_state(given.stdin), config, stamp_ns=1)
    folder = path.parts[-2]
    expected_cpus = given.recorded["bundle_config"]["cpu"]["cpus"]
    if folder == "hooks-cli":
        expected_id, expected_sandbox = "b1", "b1"
    elif KUBELET in path.parts:  # named by its bundle: Kata's id is the sandbox's in poststart
        expected_id, expected_sandbox = Path(json.loads(given.stdin)["bundle"]).name, POD
    else:
        expected_id, expected_sandbox = given.recorded["argv"][2], "p1"
    assert (container.id, container.sandbox_id) == (expected_id, expected_sandbox)
    pause = folder != "hooks-cli" and expected_id == expected_sandbox
    assert container.kind is (ContainerKind.SANDBOX if pause else ContainerKind.CONTAINER)
    assert (
        container.state
        is {
            "prestart": ContainerState.CREATED,
            "createRuntime": ContainerState.CREATED,
            "poststart": ContainerState.RUNNING,
            "poststop": ContainerState.DELETED,
        }[given.phase]
    )
    assert str(container.cpus) == expected_cpus
    assert container.quota_us == given.recorded["bundle_config"]["cpu"].get("quota")
    assert (container.note, container.source) == ("", f"hook:{given.phase}")
    if KUBELET in path.parts:
        assert container.cgroups_path.endswith(f"/{expected_id}")
    else:
        assert container.cgroups_path == f"/katalab/{expected_id}" or ":" in container.cgroups_path


@each(HOOKS)
def test_around_a_hook(path: Path) -> None:
    """What surrounded the hook parses: its cgroup, the shim's line, the VMM's line behind pid."""
    recorded = recordings.hook_input(path).recorded
    proc.parse_cgroup("\n".join(recorded["cgroup"]).encode())
    if "containerd-shim" in recorded["parent_cmdline"][0]:
        assert vmm_cmdline.parse_shim(recorded["parent_cmdline"]).sandbox_id in ("p1", POD)
    behind = recorded["state_pid"]
    line = behind.get("cmdline") if isinstance(behind, dict) else None
    if line and "qemu-system" in line[0]:
        assert recorded["hook"] in ("prestart", "createRuntime")
        assert qemu.parse_qemu(line).sandbox_id in ("p1", POD)


def test_the_state_pid_is_qemu_where_kata_says_so() -> None:
    """Kata 3 hands QEMU's pid to prestart and createRuntime; its line is in the recording."""
    recorded = [recordings.hook_input(path).recorded for path in HOOKS if of_kata_3(path)]
    early = [entry for entry in recorded if entry["hook"] in ("prestart", "createRuntime")]
    assert len(early) == 14
    for entry in early:
        assert "qemu-system" in entry["state_pid"]["cmdline"][0]


@each(CMDLINES)
def test_qemu_cmdline(path: Path) -> None:
    """Each line gives sandbox, topology, accelerator and iothread, without a problem."""
    command = qemu.parse_qemu(recordings.argv(path))
    rust = "kata-4.1" in path.parts
    new = rust or of_kata_3(path)
    assert command.sandbox_id in {"p1", "p2", "b1", POD, RUST_POD}
    expected = (1 if KUBELET in path.parts else 2, 16, 16, 1, 1) if new else (1, 2, 2, 1, 1)
    if rust:  # sized before its start, all in one socket
        expected = (3, 3, 1, 3, 1)
    guest = command.guest
    shape = (guest.boot, guest.maximum, guest.sockets, guest.cores, guest.threads)
    assert shape == expected
    assert command.kvm is new
    iothread = "scsi-io-thread" if rust else "iothread-X"
    assert [re.sub("[0-9a-f]{16}$", "X", name) for name in command.iothreads] == [iothread]
    assert bool(command.guest_cid) is new
    assert command.problems == ()


@each(THREADS)
def test_thread_table(path: Path) -> None:
    """Masks and cgroups of each thread parse; a cgroup names the sandbox where Kata made one."""
    table = recordings.threads(path)
    assert len(table) >= 5
    for thread in table:
        assert CpuSet.parse(thread.cpus)
        groups = proc.parse_cgroup(thread.cgroup)
        assert groups.cpuset is not None
        if groups.cpuset.path != "/":
            assert any(map(groups.names, ("p1", "p2", POD)))


@each(STATUSES)
def test_status_cgroup_and_descriptors(path: Path) -> None:
    """Mask, cgroup and vCPU descriptors of each QEMU; hotplugged vCPUs have the highest ids."""
    recorded = recordings.process(path)
    mask = proc.status_field(recorded.status, "Cpus_allowed_list")
    assert CpuSet.parse(mask or "")
    assert proc.parse_cgroup(recorded.cgroup).unified is not None
    vcpus = [proc.vcpu_of_link(target) for target in recorded.links.values()]
    found = sorted(vcpu for vcpu in vcpus if vcpu is not None)
    boot = 1 if KUBELET in path.parts else 2
    if not of_kata_3(path):
        assert found == []  # TCG
    else:
        assert found[:boot] == list(range(boot))
        assert found[boot:] == list(range(16 - len(found[boot:]), 16))


@each(SANDBOXES)
def test_persist(path: Path) -> None:
    """Each sandbox file gives its pid, pinning and containers with live cpusets."""
    parsed = kata.parse_persist(path.read_bytes())
    assert parsed.sandbox_id == path.name.split("_")[3]
    pids = list(path.parent.glob("run_vc_vm_*_pid"))
    assert [int(pid.read_text()) for pid in pids] in ([parsed.vmm_pid], [])
    assert parsed.vcpu_pinning is ("own-pinning-panic" in path.parts)
    assert bool(parsed.virtiofsd_pid) is of_kata_3(path)
    containers = kata.to_containers(parsed)
    assert all(container.sandbox_id == parsed.sandbox_id for container in containers)
    own = containers[1:] if KUBELET in path.parts else containers  # a kubelet's pause has none
    assert all(container.cpus for container in own)
    assert all(container.note == "" for container in containers)
    assert containers[0].id == parsed.sandbox_id


def test_persist_is_live() -> None:
    """persist.json carries the cpuset after an update, not the one of config.json."""
    before, after = (
        kata.parse_persist((DATA / "kata-1.13" / folder / name).read_bytes())
        for folder, name in (
            ("cli", "run_vc_sbs_b1_persist.json"),
            ("cli-after-update", "run_vc_sbs_b1_persist.json"),
        )
    )
    assert [sandbox.containers[0].cpu.cpus for sandbox in (before, after)] == ["0-1", "1"]


def test_persist_of_a_pod() -> None:
    """A pod of both versions: the pause container and the other, each with its own."""
    for version in ("kata-1.13/shimv2-sandbox-and-container", "kata-3.21/sandbox-and-container"):
        data = (DATA / version / "run_vc_sbs_p1_persist.json").read_bytes()
        pause, app = kata.to_containers(kata.parse_persist(data))
        assert (pause.kind, pause.id) == (ContainerKind.SANDBOX, "p1")
        assert (app.kind, app.id, app.sandbox_id) == (ContainerKind.CONTAINER, "p1c1", "p1")
        assert app.quota_us in (100000, 200000)


@each(CONTAINERS)
def test_container_persist(path: Path) -> None:
    """Each container file gives its state."""
    assert kata.container_state(path.read_bytes()) is ContainerState.RUNNING


@each(BUNDLES)
def test_bundle(path: Path) -> None:
    """Each whole config.json names its container, the pod and what the kubelet gave it."""
    config, state = parse_config(path.read_bytes()), OciState(POD, f"/run/task/{POD}")
    container = record(Phase.CREATE_RUNTIME, state, config, stamp_ns=1)
    pod = (container.sandbox_id, container.pod_namespace, container.pod_name)
    assert pod == (POD, "default", "g3-lab")
    assert container.pod_uid == "00000000-0000-4000-8000-000000000004"
    cpus = {"app": "1-2", "log": "0,5-15", "": ""}[container.name]
    assert str(container.cpus or "") == cpus


@each(CHECKPOINTS)
def test_checkpoint(path: Path) -> None:
    """The kubelet's checkpoint has the exclusive CPUs of both pods that have some."""
    state = parse_checkpoint(path.read_bytes())
    assert (state.policy, str(state.default)) == ("static", "0,5-15")
    given = {uid[-1]: str(one["app"]) for uid, one in state.entries.items()}
    assert given == {"3": "3-4", "4": "1-2"}


@each(QMP)
def test_qmp(path: Path) -> None:
    """Answers check out, and index, place and APIC id agree with the command line's -smp."""
    guest = qemu.parse_qemu(recordings.argv(path.with_name("qemu-cmdline.txt"))).guest
    tids = {thread.tid for thread in recordings.threads(path.with_name("qemu-threads.txt"))}
    for replies in recordings.qmp_replies(path):
        answers = check_answers(replies["query-cpus-fast"], replies["query-iothreads"])
        assert len(replies["query-hotpluggable-cpus"]) == guest.maximum
        assert {cpu.thread_id for cpu in answers.cpus} <= tids
        assert {iothread.thread_id for iothread in answers.iothreads} <= tids
        for cpu in replies["query-cpus-fast"]:
            index, said = cpu["cpu-index"], cpu["props"]
            place = qemu.place_of(guest, index)
            shown = (said["socket-id"], said["core-id"], said["thread-id"])
            assert shown == (place.socket, place.core, place.thread)
            assert qemu.apic_id(guest, index) == index
            hotplugged = cpu["qom-path"].startswith("/machine/peripheral")
            assert hotplugged is (index >= guest.boot)


def test_some_qmp_sessions_answered() -> None:
    """Three of the recorded monitors answered; the others were held by the shim."""
    answered = [path.parent.name for path in QMP if list(recordings.qmp_replies(path))]
    assert sorted(answered) == [
        "cli",
        "cli-after-update",
        "debug-and-extra-monitor",
        "own-pinning-panic",
    ]


_PROCESS = re.compile(
    r"pid \d+ ppid (?P<ppid>\d+) comm (?P<comm>.*?) cpus \['(?P<cpus>.*?)'\]"
    r" cgroup \[':?(?P<cgroup>.*?)'.*? :: (?P<argv>.*)$"
)


@each(PROCESSES)
def test_processes(path: Path) -> None:
    """virtiofsd names its sandbox, kernel threads nothing; all cpu lists parse."""
    found = 0
    for line in path.read_text().splitlines():
        match = _PROCESS.match(line)
        if match is None:
            continue
        found += 1
        CpuSet.parse(match["cpus"])
        sandbox = Path(match["cgroup"]).name if KUBELET in path.parts else "p1"
        named = vmm_cmdline.names_sandbox(match["argv"].split(), sandbox)
        if match["comm"] == "virtiofsd":
            assert named
        if match["ppid"] == "2":
            assert not named
    assert found


def test_vcpu_threads_by_descriptor() -> None:
    """Without names and QMP: system call and descriptor identify each vCPU thread (kernel 6.1)."""
    text = (DATA / "kata-3.21" / "thread-identification.txt").read_text()
    links = {int(fd): target for fd, target in re.findall(r"^(\d+) -> (\S+)$", text, re.MULTILINE)}
    found = {}
    calls = re.findall(r"^tid (\d+) .* syscall=(.*?) stack=", text, re.MULTILINE)
    for tid, words in calls:
        call = proc.parse_syscall(words.encode())
        descriptor = None if call is None else call.kvm_run_fd()
        if descriptor is not None:
            found[int(tid)] = proc.vcpu_of_link(links[descriptor])
    assert found == {1792: 0, 1793: 1, 1800: 15, 1801: 14, 1802: 13, 1803: 12}
    assert len(calls) == 10


def test_vhost_workers_are_no_vcpus() -> None:
    """Kernel 6.12: vhost tasks inside QEMU show another ioctl and no vCPU descriptor."""
    text = (DATA / "kata-3.21-kernel-6.12" / "run.txt").read_text()
    calls = re.findall(r"comm vhost-\d+ .* syscall (.*)$", text, re.MULTILINE)
    assert len(calls) == 3
    for words in calls:
        call = proc.parse_syscall(words.encode())
        assert call is not None
        assert call.kvm_run_fd() is None
    lines = re.findall(r"^  \d+ '.*?' (\S+) (0::\S*) (\S*)$", text, re.MULTILINE)
    assert len(lines) > 20
    for cpus, cgroup, target in lines:
        assert CpuSet.parse(cpus)
        assert proc.parse_cgroup(cgroup.encode()).unified is not None
        assert (proc.vcpu_of_link(target) is not None) is bool(target)
