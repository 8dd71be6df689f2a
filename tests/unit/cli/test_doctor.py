"""`doctor`: what it says of a host that is made of files, of a daemon, and of its sandboxes."""

import json
import os
import socket
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.document import Daemon, Metrics, Nri
from kata_pin.base.documents.pools import Push, PushFailure
from kata_pin.base.documents.state import State
from kata_pin.base.values import KataRuntime
from kata_pin.cli.doctor.node import CAPABILITIES
from tests.support.checkpoint import checkpoint
from tests.unit.cli import documents as docs
from tests.unit.conftest import Doctor

AWAY = replace(docs.NRI, connected_s=None, problem="refused")

KATA_CONFIG = """
[hypervisor.qemu]
path = "/opt/kata/bin/qemu-system-x86_64"
default_vcpus = 2
enable_debug = true
extra_monitor_socket = "qmp"
[runtime]
enable_vcpus_pinning = {pinning}
"""


@pytest.mark.root
def test_a_configuration_that_others_can_change_is_a_warning(doctor: Doctor) -> None:
    """The file allows executables as VMMs: it has to be root's alone."""
    assert doctor.row("configuration").status == "ok"
    file = doctor.folder / "commands.yaml"
    file.chmod(0o664)
    assert doctor.row("configuration").status == "warn"
    file.chmod(0o644)
    os.chown(file, 65534, 0)
    assert doctor.row("configuration").status == "warn"


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (
            (),
            [
                ("fail", "CAP_SYS_NICE"),
                ("fail", "CAP_SYS_PTRACE"),
                ("warn", "CAP_DAC_READ_SEARCH"),
                ("info", "CAP_NET_ADMIN"),
            ],
        ),
        ((2, 12, 19, 23), [("ok", "CAP_SYS_NICE,")]),
    ],
)
def test_missing_rights_are_named(
    doctor: Doctor, bits: tuple[int, ...], expected: list[tuple[str, str]]
) -> None:
    """Each is a row of its own with its weight; with all of them there is one ok."""
    held = sum(1 << bit for bit in bits)
    doctor.write("proc/self/status", f"Name:\tx\nCapEff:\t{held:016x}\nCapBnd:\t0")
    rows = doctor.rows("capabilities")
    assert [(row.status, row.text.split()[0]) for row in rows] == expected


def test_capability_numbers_are_the_kernels() -> None:
    """The bits are those of linux/capability.h, where it is installed."""
    header = Path("/usr/include/linux/capability.h")
    if not header.exists():
        pytest.skip("no kernel headers")
    words = [line.split() for line in header.read_text().splitlines()]
    for bit, (name, _, _) in CAPABILITIES.items():
        assert ["#define", name, str(bit)] in [line[:3] for line in words]


DEBUG = {"paths": {"debugfs": "/debug"}}


def test_debugfs_states_are_told_apart(doctor: Doctor) -> None:
    """Not mounted, without KVM, and readable are three answers."""
    mount = doctor.files / "debug"
    mount.mkdir()
    assert doctor.row("debugfs", **DEBUG).remedy.startswith("mount -t debugfs")
    (mount / "x86").mkdir()
    assert "KVM is not loaded" in doctor.row("debugfs", **DEBUG).text
    (mount / "kvm" / "41-13").mkdir(parents=True)
    row = doctor.row("debugfs", **DEBUG)
    assert (row.status, row.text) == ("ok", f"{mount}/kvm is readable, 1 VM")


def test_debugfs_is_looked_at_as_the_daemon_sees_it(doctor: Doctor) -> None:
    """It may be mounted for the daemon alone, or not for it; without one, what is here counts."""
    theirs = doctor.files / "proc" / str(docs.RUNNING.pid) / "root" / "debug"
    for mount in (doctor.files / "debug", theirs):
        mount.mkdir(parents=True)
    (theirs / "kvm" / "41-13").mkdir(parents=True)
    row = doctor.row("debugfs", **DEBUG)
    assert (row.status, row.text) == ("ok", f"{theirs}/kvm is readable, 1 VM")
    (doctor.files / "debug" / "kvm").mkdir()
    rmtree(theirs / "kvm")
    row = doctor.row("debugfs", **DEBUG)
    assert (row.text.split(";")[0], row.remedy) == (
        f"not mounted at {theirs}", "systemctl restart kata-pin"
    )  # fmt: skip
    doctor.state = docs.without_daemon(docs.state())
    assert doctor.row("debugfs", **DEBUG).text.startswith(f"{doctor.files}/debug/kvm is readable")


def test_the_self_test_asks_the_running_kernel_only(doctor: Doctor) -> None:
    """A captured tree has none."""
    said = "unknown whether they survive cpuset changes: not the running system"
    assert doctor.row("affinities").text == said


def test_process_events_are_tried_on_this_host(doctor: Doctor) -> None:
    """The row agrees with the setting: switched off is said even where they work."""
    assert doctor.row("process events").status in {"ok", "warn"}
    assert doctor.row("process events", new_threads="audit").status in {"info", "warn"}


def test_kubelet_states(doctor: Doctor) -> None:
    """No checkpoint is information, a damaged one a warning."""
    path = doctor.folder / "cpu_manager_state"
    paths = {"kubelet_state": str(path)}
    assert doctor.row("kubelet", paths=paths).status == "info"
    path.write_text("{")
    assert doctor.row("kubelet", paths=paths).status == "warn"
    path.write_text(checkpoint("0-3", {"a": {"c": "4-6"}, "b": {"c": "7"}}))
    row = doctor.row("kubelet", paths=paths)
    assert (row.status, row.remedy) == ("ok", "")
    path.write_text(checkpoint("0-4", {"a": {"c": "4-6"}, "b": {"c": "6"}}))
    row = doctor.row("kubelet", paths=paths)
    assert row.status == "warn"
    assert (
        "pCPU 4 is assigned to pod a and the default set; pCPU 6 is assigned to pod a" in row.text
    )
    assert row.text.endswith("and pod b")
    assert "cores of different sizes" in row.remedy
    recorded = Path(__file__).resolve().parents[2] / "data/kubelet/kubelet_checkpoints.json"
    path.write_text(json.loads(recorded.read_text())["checkpoints"][-2]["file"])
    assert doctor.row("kubelet", paths=paths).text == (  # kubelet 1.37
        "policy static, default set 0,8-32,40-63, 1 container with exclusive CPUs, "
        "3 pods with pod-level CPUs"
    )


def test_claims_beside_the_kubelet(doctor: Doctor) -> None:
    """Both give CPUs away: the static policy beside the DRA driver is a warning, none is not."""
    state, specs = doctor.folder / "cpu_manager_state", doctor.folder / "cdi"
    paths = {"kubelet_state": str(state), "cdi": str(specs)}
    assert doctor.rows("DRA claims", paths=paths) == []
    specs.mkdir()
    uid = "0f8f5e2a-6b1c-4a55-9a51-0d1a6a1e7c11"
    edits = {"env": [f"DRA_CPUSET_{uid}=2-3"]}
    devices = [{"name": f"claim-{uid}", "containerEdits": edits}]
    spec = {"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": devices}
    (specs / "claim.json").write_text(json.dumps(spec))
    row = doctor.row("DRA claims", paths=paths)
    assert (row.status, row.text) == ("ok", "1 claim of pCPUs 2-3")
    state.write_text(checkpoint("0-1", {"a": {"c": "3-4"}}))
    row = doctor.row("DRA claims", paths=paths)
    assert row.status == "warn"
    assert row.text.endswith("static policy, which knows nothing of them; pCPU 3 given by both")
    assert "cpuManagerPolicy: none" in row.remedy
    (specs / "claim.json").write_text("{")
    row = doctor.row("DRA claims", paths=paths)
    assert (row.status, row.text[:14]) == ("warn", "not all read: ")


def test_a_vm_smaller_than_its_claims(doctor: Doctor) -> None:
    """Kata does not count claims: without limits the VM has vCPUs for some of the CPUs only."""
    container = docs.container("app", "4-6", "4-6", provenance="claim")
    threads = [docs.thread(4100 + n, "vcpu", str(n), vcpu=n - 4) for n in (4, 5, 6)]
    sandbox = docs.sandbox("shop/web", "4-6", *threads[:2], containers=(container,))
    row = doctor.of(sandbox)["DRA claims"]
    assert (row.status, row.text) == ("warn", "pCPUs 4-6 by DRA claim, and the VM has 2 vCPUs")
    ended = replace(sandbox, containers=(replace(container, state="stopped"),))
    assert "DRA claims" not in doctor.of(ended)
    sandbox = docs.sandbox("shop/web", "4-6", *threads, containers=(container,))
    assert "DRA claims" not in doctor.of(sandbox)


def test_cpus_of_two_running_containers_of_a_pod(doctor: Doctor) -> None:
    """An init container's CPUs may be reused when it has ended, not by containers that run."""
    first, second = docs.container("web", "4-6", "4-6"), docs.container("db", "6-8", "6-8")
    sandbox = docs.sandbox("shop/web", "4-8", containers=(first, second))
    row = doctor.of(sandbox)["kubelet"]
    assert (row.status, row.text) == ("warn", "pCPU 6 is assigned to web and db")
    ended = replace(sandbox, containers=(replace(first, state="stopped"), second))
    assert "kubelet" not in doctor.of(ended)


def test_a_class_of_another_size_is_a_warning(doctor: Doctor) -> None:
    """Pods of `kata-cpus-4` should have 4 exclusive CPUs; other handlers say no number."""
    sandbox = docs.database()
    cpus = sum(len(CpuSet.parse(one.exclusive)) for one in sandbox.containers)
    for handler in (f"kata-cpus-{cpus}", "kata-cpus-x"):
        assert "VM size" not in doctor.of(replace(sandbox, handler=handler))
    handler = f"kata-qemu-cpus-{cpus + 3}"
    row = doctor.of(replace(sandbox, handler=handler))["VM size"]
    assert row.status == "warn"
    assert row.text == (
        f"class {handler} is for {cpus + 3}, the pod has {cpus} exclusive "
        f"CPU{'s' if cpus != 1 else ''}"
    )
    assert row.remedy == f"kata-pin kata-class --cpus {cpus} --handler kata-qemu"


@pytest.mark.root
@pytest.mark.parametrize(("pinning", "status"), [("true", "warn"), ("false", "ok")])
def test_katas_own_pinning_is_a_warning(doctor: Doctor, pinning: str, status: str) -> None:
    """Two writers of vCPU affinities are told, with what to change."""
    (doctor.folder / "configuration.toml").write_text(KATA_CONFIG.format(pinning=pinning))
    row = doctor.row("kata", paths={"kata_configs": [str(doctor.folder)]})
    assert row.status == status
    assert "default_vcpus 2" in row.text
    assert "extra monitor qmp" in row.text
    assert ("enable_vcpus_pinning = false" in row.remedy) is (status == "warn")


def test_no_kata_configuration_is_a_warning(doctor: Doctor) -> None:
    """The row says where it looked."""
    row = doctor.row("kata", paths={"kata_configs": [str(doctor.folder)]})
    assert (row.status, str(doctor.folder) in row.text) == ("warn", True)


def test_spool_leftovers_are_counted(doctor: Doctor) -> None:
    """Messages that no daemon took in are a warning."""
    assert doctor.row("spool").status == "info"
    spool = doctor.folder / "spool"
    spool.mkdir()
    (spool / "1-2.msg.tmp").touch()
    assert doctor.row("spool").status == "ok"
    (spool / "1-2.msg").touch()
    assert doctor.row("spool").text == f"1 pending message in {spool}"
    (spool / "uninstalled").touch()
    assert "kata-pin was uninstalled" in doctor.row("spool").text


def test_a_sandbox_in_order(doctor: Doctor) -> None:
    """Roles from a certain source and every reachable mode are ok."""
    rows = doctor.of(docs.database(), housekeeping="0,1")
    assert rows["vCPUs"].text == "3 identified by debugfs (3)"
    assert rows["overhead"].text == (
        "usable modes: auto (shared CPUs), auto (kubelet's default set), sandbox, housekeeping, "
        "reserve:k"
    )


def test_a_vm_locked_into_its_cpuset(doctor: Doctor) -> None:
    """Where the cgroup allows the sandbox's CPUs only, the others are named as out of reach."""
    threads = [
        docs.thread(1, "vcpu", "4", vcpu=0, cpuset="4-5"),
        docs.thread(2, "emulator", "4-5", cpuset="4-5"),
    ]
    sandbox = docs.sandbox("a/b", "4-5", *threads, exclusive="4-5", shared="")
    row = doctor.of(sandbox, housekeeping="0")["overhead"]
    assert row.text == (
        "usable modes: sandbox, reserve:k; not usable: auto (kubelet's default set), housekeeping "
        "(cgroups allow 4-5)"
    )


def test_a_mode_works_only_if_every_thread_gets_there(doctor: Doctor) -> None:
    """One thread that is locked in takes a mode away."""
    threads = [
        docs.thread(1, "emulator", "4", cpuset="4-5"),
        docs.thread(2, "virtiofsd", "4", cpuset="0-15"),
    ]
    sandbox = docs.sandbox("a/b", "4-5", *threads)
    row = doctor.of(sandbox, housekeeping="0")["overhead"]
    assert "not usable: auto (kubelet's default set), housekeeping" in row.text


def test_inferred_and_contradicting_roles_are_warnings(doctor: Doctor) -> None:
    """Creation order, contradiction and absence each have their text."""
    ordered = docs.sandbox("a/b", "4", docs.thread(1, "vcpu", "4", vcpu=0, source="order"))
    assert doctor.of(ordered)["vCPUs"].text == "1 identified by order (1): their order is inferred"
    ordered = replace(ordered, vmm=docs.vmm(kvm=False))
    assert doctor.of(ordered)["vCPUs"].remedy == ""
    known = docs.thread(2, "vcpu", "4", vcpu=1)
    row = doctor.of(replace(ordered, threads=(*ordered.threads, known)))["vCPUs"]
    assert row.text.startswith("2 identified by order (1), debugfs (1): their order is inferred")
    torn = docs.sandbox("a/b", "4", docs.thread(1, "vcpu", "4", vcpu=0, conflict="qmp: 1"))
    assert doctor.of(torn)["vCPUs"].text.endswith("sources disagree")
    assert doctor.of(docs.sandbox("a/b", "4"))["vCPUs"].status == "warn"


def test_a_bundle_that_may_not_be_read_is_named(doctor: Doctor) -> None:
    """A container recorded without a cpuset is told with the reason, one that is over is not."""
    outside = "bundle '/data/x' is not read: outside all bundle roots"
    sandbox = docs.sandbox("a/b", "4", containers=[docs.container("app", None, note=outside)])
    row = doctor.of(sandbox)["record"]
    assert (row.status, row.text) == ("warn", f"container app: {outside}")
    assert row.remedy == "see paths.bundle_roots"
    ended = docs.container("app", None, note=outside, state="deleted")
    sandbox = docs.sandbox("a/b", "4", containers=[ended])
    assert "record" not in doctor.of(sandbox)


def test_monitors(doctor: Doctor) -> None:
    """An extra monitor is seen by its socket; nothing is connected to."""
    sandbox = docs.database()
    paths = {"vc": str(doctor.folder)}
    assert doctor.of(sandbox, paths=paths)["QMP"].status == "info"
    folder = doctor.folder / "vm" / sandbox.id
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as monitor:
        here = os.open(folder, os.O_RDONLY)
        monitor.bind(f"/proc/self/fd/{here}/extra-monitor.sock")
        os.close(here)
        assert doctor.of(sandbox, paths=paths)["QMP"].status == "ok"
        off = doctor.of(sandbox, paths=paths, qmp={"enabled": False})
        assert "disabled" in off["QMP"].text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "queried only during the pod's first hook"),
        ({"orphan": True}, "Kata's shim, which held QMP's socket, has exited"),
        ({"runtime": KataRuntime.RUST}, "runtime-rs holds QMP's socket"),
    ],
)
def test_when_qmp_is_asked(doctor: Doctor, fields: dict[str, Any], words: str) -> None:
    """The window of the first hook is the Go runtime's, and only while its shim lives."""
    sandbox = docs.database()
    assert sandbox.vmm is not None
    sandbox = replace(sandbox, vmm=replace(sandbox.vmm, **fields))
    assert words in doctor.of(sandbox)["QMP"].text


def test_a_sandbox_without_a_vmm_is_one_row(doctor: Doctor) -> None:
    """Only the problem is told."""
    rows = doctor.of(docs.lost())
    assert set(rows) == {"VMM"}
    assert "not on the allow-list" in rows["VMM"].text


def test_warnings_of_a_sandbox_are_rows(doctor: Doctor) -> None:
    """Notes of the pass are repeated under their code."""
    assert "2 vCPUs for 4 exclusive CPUs" in doctor.of(docs.drifted())["test"].text


def test_a_check_that_breaks_is_a_row(doctor: Doctor) -> None:
    """A root without /proc ends no doctor_node."""
    document = doctor.document()
    assert not document.ok
    assert any(row.text.startswith("a check could not run") for row in document.rows)
    assert any(row.check == "kubelet" for row in document.rows)


@pytest.mark.parametrize(
    ("nri", "enabled", "status", "text"),
    [
        (None, "auto", "info", "disabled"),
        (AWAY, "auto", "info", "nri.sock: refused"),
        (AWAY, "yes", "warn", "nri.sock: refused"),
        (docs.NRI, "auto", "ok", "containerd v2.1.4 on /var/run/nri/nri.sock, connected for 26 h"),
    ],
)
def test_the_connection_to_nri_is_told(
    doctor: Doctor, nri: Nri | None, enabled: str, status: str, text: str
) -> None:
    """Connected since when and to what, or why not; a warning where the settings say yes.

    Where it is connected, no hook is missing.
    """
    doctor.state = replace(docs.state(), daemon=replace(docs.RUNNING, nri=nri))
    rows = {row.check: row for row in doctor(nri={"enabled": enabled})}
    assert rows["NRI"].status == status
    assert text in rows["NRI"].text
    assert nri is not docs.NRI or "no runtime runs the hook" not in rows["hooks"].text


def test_where_metrics_are_served_is_told(doctor: Doctor) -> None:
    """The address, or what is in the way; nothing of both without the daemon."""
    row = doctor.row("metrics")
    assert (row.status, row.text) == ("ok", docs.METRICS.address)
    taken = Metrics("http://x", "http://x: in use")
    for metrics, status in ((taken, "warn"), (None, "info")):
        doctor.state = replace(docs.state(), daemon=replace(docs.RUNNING, metrics=metrics))
        assert doctor.row("metrics").status == status
    doctor.state = docs.without_daemon(docs.state())
    assert not {"NRI", "metrics"} & {row.check for row in doctor()}


@pytest.mark.parametrize(
    ("push", "status", "text"),
    [
        (docs.push("nri"), "ok", "are sent at once by NRI"),
        (docs.push("cri", "too old"), "ok", "are sent at once by CRI (too old)"),
        (docs.push("", "too old"), "info", "are sent at the runtime's next NRI call (too old)"),
        (docs.push("cri", problem="no socket"), "warn", "pending: no socket"),
        (
            docs.push("nri", failures=[PushFailure("c", "busy")]),
            "warn",
            "NRI; 1 container was not changed",
        ),
    ],
)
def test_how_cpusets_reach_containers(doctor: Doctor, push: Push, status: str, text: str) -> None:
    """By which way, why not by a better one, and what does not work."""
    doctor.state = docs.allotted(push=push)
    row = doctor.row("cpusets")
    assert row.status == status
    assert text in row.text


@pytest.mark.parametrize(
    "state",
    [
        docs.state(),
        docs.allotted(push=None),
        docs.allotted(suspended="the kubelet's CPU manager policy is static"),
    ],
)
def test_nothing_of_cpusets_where_none_are_decided(doctor: Doctor, state: State) -> None:
    """Without an allocator, without a daemon, and while it is suspended."""
    doctor.state = state
    assert doctor.rows("cpusets") == []


def test_other_writers_are_named(doctor: Doctor) -> None:
    """Who, by which evidence, how often, since when; a Kata that rests is no warning."""
    doctor.state = docs.state(docs.drifted())
    kata, other = doctor.rows("writer")
    assert (kata.status, other.status) == ("info", "warn")
    assert "persist.json" in kata.text
    assert "changed affinities 4 times since 3 m ago (tid 5101, 5102)" in other.text
    acting = docs.sandbox("p", "1", writers=[docs.writer("kata", active=True, evidence="e")])
    row = doctor.of(acting)["writer"]
    assert (row.status, row.text) == ("warn", "Kata pins the vCPUs (e)")


def test_what_keeps_a_vmm_on_its_pcpus(doctor: Doctor) -> None:
    """Its cgroup's cpuset, or affinity alone: then Kata's setting is named."""
    loose = docs.database()
    row = doctor.of(loose)["confinement"]
    assert row.status == "info"
    assert row.text.startswith("only affinity keeps the VMM off pCPUs")
    assert "sandbox_cgroup_only = true" in row.remedy
    threads = tuple(replace(one, cpuset=loose.mask or "") for one in loose.threads)
    held = doctor.of(replace(loose, threads=threads))["confinement"]
    assert (held.status, held.remedy) == ("ok", "")
    assert "cpuset of its cgroup" in held.text
    assert doctor.of(replace(docs.drifted(), mask="1"))["confinement"].status == "warn"


@pytest.mark.parametrize(
    ("daemon", "status", "remedy"),
    [
        (docs.RUNNING, "ok", ""),
        (
            Daemon(running=False, reason="no daemon is listening"),
            "warn",
            "systemctl start kata-pin; if it stops again, journalctl -u kata-pin says why",
        ),
        (
            Daemon(running=False, reason="no answer", silent=True),
            "fail",
            "systemctl restart kata-pin",
        ),
    ],
)
def test_the_remedy_of_a_daemon_fits_its_state(
    doctor: Doctor, daemon: Daemon, status: str, remedy: str
) -> None:
    """One that is down is started; starting one that hangs would do nothing."""
    doctor.state = replace(docs.state(), daemon=daemon)
    row = doctor.row("daemon")
    assert (row.status, row.remedy) == (status, remedy)
