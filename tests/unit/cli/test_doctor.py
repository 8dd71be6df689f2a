"""`doctor`: each check on this host or on a prepared folder, and what it says of sandboxes."""

import json
import os
import socket
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config, NewThreads, NriEnabled, Paths, Qmp
from kata_pin.base.config.tree import Nri as NriSettings
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.document import Daemon, Metrics, Nri
from kata_pin.base.documents.measured import WatchDocument
from kata_pin.base.documents.pools import Push, PushFailure
from kata_pin.base.documents.state import Row, Sandbox
from kata_pin.base.errors import ConfigError, DaemonError
from kata_pin.base.values import KataRuntime
from kata_pin.cli.client import Provider
from kata_pin.cli.doctor import install, node, sandboxes
from kata_pin.cli.node.changes import NodeFiles
from kata_pin.linux.files import HOST, HostRoot
from tests.support.checkpoint import checkpoint
from tests.support.commandline import run
from tests.unit.cli import documents as docs
from tests.unit.conftest import Serve, given

KATA_CONFIG = """
[hypervisor.qemu]
path = "/opt/kata/bin/qemu-system-x86_64"
default_vcpus = 2
enable_debug = true
extra_monitor_socket = "qmp"
[runtime]
enable_vcpus_pinning = {pinning}
"""


def root_with_status(folder: Path, capabilities: int) -> HostRoot:
    """Return a root whose /proc/self/status has these effective capabilities."""
    status = folder / "proc" / "self" / "status"
    status.parent.mkdir(parents=True)
    status.write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\nCapBnd:\t0\n")
    return HostRoot(str(folder))


@pytest.mark.root
def test_a_configuration_that_others_can_change_is_a_warning(tmp_path: Path) -> None:
    """The file allows executables as VMMs: it has to be root's alone."""
    file = tmp_path / "k.yaml"
    assert node.configuration(str(file)).status == "info"
    file.touch()
    file.chmod(0o644)
    assert node.configuration(str(file)).status == "ok"
    file.chmod(0o664)
    assert node.configuration(str(file)).status == "warn"
    file.chmod(0o644)
    os.chown(file, 65534, 0)
    assert node.configuration(str(file)).status == "warn"


def test_missing_rights_are_named(tmp_path: Path) -> None:
    """Without capabilities each is a row of its own with its weight."""
    rows = list(node.rights(root_with_status(tmp_path, 0)))
    assert [(r.status, r.text.split()[0]) for r in rows] == [
        ("fail", "CAP_SYS_NICE"),
        ("fail", "CAP_SYS_PTRACE"),
        ("warn", "CAP_DAC_READ_SEARCH"),
        ("info", "CAP_NET_ADMIN"),
    ]


def test_held_rights_are_one_row(tmp_path: Path) -> None:
    """With all of them there is one ok."""
    bits = sum(1 << bit for bit in (2, 12, 19, 23))
    (row,) = node.rights(root_with_status(tmp_path, bits))
    assert row.status == "ok"


def test_capability_numbers_are_the_kernels() -> None:
    """The bits are those of linux/capability.h, where it is installed."""
    header = Path("/usr/include/linux/capability.h")
    if not header.exists():
        pytest.skip("no kernel headers")
    words = [line.split() for line in header.read_text().splitlines()]
    for bit, (name, _, _) in node.CAPABILITIES.items():
        assert ["#define", name, str(bit)] in [line[:3] for line in words]


def test_debugfs_states_are_told_apart(tmp_path: Path) -> None:
    """Not mounted, without KVM, and readable are three answers."""
    mount = tmp_path / "debug"
    mount.mkdir()
    host = HostRoot(str(tmp_path), debugfs="/debug")
    assert node.debugfs(host).remedy.startswith("mount -t debugfs")
    (mount / "x86").mkdir()
    assert "KVM is not loaded" in node.debugfs(host).text
    (mount / "kvm" / "41-13").mkdir(parents=True)
    row = node.debugfs(host)
    assert (row.status, row.text) == ("ok", f"{mount}/kvm is readable, 1 VM")


def test_debugfs_is_looked_at_as_the_daemon_sees_it(tmp_path: Path) -> None:
    """It may be mounted for the daemon alone, or not for it; without one, what is here counts."""
    host = HostRoot(str(tmp_path), debugfs="/debug")
    theirs = tmp_path / "proc" / "812" / "root" / "debug"
    for mount in (tmp_path / "debug", theirs):
        mount.mkdir(parents=True)
    (theirs / "kvm" / "41-13").mkdir(parents=True)
    row = node.debugfs(host, 812)
    assert (row.status, row.text) == ("ok", f"{theirs}/kvm is readable, 1 VM")
    assert node.debugfs(host).remedy == "mount -t debugfs none /debug"
    (tmp_path / "debug" / "kvm").mkdir()
    rmtree(theirs / "kvm")
    row = node.debugfs(host, 812)
    assert (row.text.split(";")[0], row.remedy) == (
        f"not mounted at {theirs}", "systemctl restart kata-pin"
    )  # fmt: skip


def test_process_events_are_tried_on_this_host() -> None:
    """The row agrees with the setting: switched off is said even where they work."""
    assert node.process_events(Config()).status in {"ok", "warn"}
    row = node.process_events(Config(new_threads=NewThreads.AUDIT))
    assert row.status in {"info", "warn"}


def test_hooks_are_found_by_name(tmp_path: Path) -> None:
    """A file that names the hook counts; the hook has to be there to be run."""
    pattern = (f"{tmp_path}/*.json",)
    program = tmp_path / "kata-pin-hook"
    assert install.hooks(pattern, str(program)).status == "warn"
    (tmp_path / "other.json").write_text("{}")
    assert install.hooks(pattern, str(program)).status == "warn"
    (tmp_path / "90-kata-pin.json").write_text('{"hook": {"path": "/x/kata-pin-hook"}}')
    assert install.hooks(pattern, str(program)).status == "fail"
    program.write_text("#!/bin/true\n")
    program.chmod(0o755)
    row = install.hooks(pattern, str(program))
    assert (row.status, row.text) == ("ok", f"installed: {tmp_path}/90-kata-pin.json")


def test_kubelet_states(tmp_path: Path) -> None:
    """No checkpoint is information, a damaged one a warning."""
    path = tmp_path / "cpu_manager_state"
    config = Config(paths=Paths(kubelet_state=str(path)))
    assert install.kubelet(config).status == "info"
    path.write_text("{")
    assert install.kubelet(config).status == "warn"
    path.write_text(checkpoint("0-3", {"a": {"c": "4-6"}, "b": {"c": "7"}}))
    row = install.kubelet(config)
    assert (row.status, row.remedy) == ("ok", "")
    path.write_text(checkpoint("0-4", {"a": {"c": "4-6"}, "b": {"c": "6"}}))
    row = install.kubelet(config)
    assert row.status == "warn"
    assert (
        "pCPU 4 is assigned to pod a and the default set; pCPU 6 is assigned to pod a" in row.text
    )
    assert row.text.endswith("and pod b")
    assert "cores of different sizes" in row.remedy
    recorded = Path(__file__).resolve().parents[2] / "data/kubelet/kubelet_checkpoints.json"
    path.write_text(json.loads(recorded.read_text())["checkpoints"][-2]["file"])
    assert install.kubelet(config).text == (  # kubelet 1.37
        "policy static, default set 0,8-32,40-63, 1 container with exclusive CPUs, "
        "3 pods with pod-level CPUs"
    )


def test_claims_beside_the_kubelet(tmp_path: Path) -> None:
    """Both give CPUs away: the static policy beside the DRA driver is a warning, none is not."""
    state, specs = tmp_path / "cpu_manager_state", tmp_path / "cdi"
    config = Config(paths=Paths(kubelet_state=str(state), cdi=str(specs)))
    assert list(install.dra_claims(config)) == []
    specs.mkdir()
    uid = "0f8f5e2a-6b1c-4a55-9a51-0d1a6a1e7c11"
    edits = {"env": [f"DRA_CPUSET_{uid}=2-3"]}
    devices = [{"name": f"claim-{uid}", "containerEdits": edits}]
    spec = {"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": devices}
    (specs / "claim.json").write_text(json.dumps(spec))
    (row,) = install.dra_claims(config)
    assert (row.status, row.text) == ("ok", "1 claim of pCPUs 2-3")
    state.write_text(checkpoint("0-1", {"a": {"c": "3-4"}}))
    (row,) = install.dra_claims(config)
    assert row.status == "warn"
    assert row.text.endswith("static policy, which knows nothing of them; pCPU 3 given by both")
    assert "cpuManagerPolicy: none" in row.remedy
    (specs / "claim.json").write_text("{")
    (row,) = install.dra_claims(config)
    assert (row.status, row.text[:14]) == ("warn", "not all read: ")


def test_a_vm_smaller_than_its_claims() -> None:
    """Kata does not count claims: without limits the VM has vCPUs for some of the CPUs only."""
    container = docs.container("app", "4-6", "4-6", provenance="claim")
    threads = [docs.thread(4100 + n, "vcpu", str(n), vcpu=n - 4) for n in (4, 5, 6)]
    sandbox = docs.sandbox("shop/web", "4-6", *threads[:2], containers=(container,))
    (row,) = sandboxes.claimed(sandbox, "shop/web")
    assert (row.status, row.text) == ("warn", "pCPUs 4-6 by DRA claim, and the VM has 2 vCPUs")
    ended = replace(sandbox, containers=(replace(container, state="stopped"),))
    assert not list(sandboxes.claimed(ended, "shop/web"))
    sandbox = docs.sandbox("shop/web", "4-6", *threads, containers=(container,))
    assert not list(sandboxes.claimed(sandbox, "shop/web"))


def test_cpus_of_two_running_containers_of_a_pod() -> None:
    """An init container's CPUs may be reused when it has ended, not by containers that run."""
    first, second = docs.container("web", "4-6", "4-6"), docs.container("db", "6-8", "6-8")
    sandbox = docs.sandbox("shop/web", "4-8", containers=(first, second))
    (row,) = sandboxes.doubles(sandbox, "shop/web")
    assert (row.status, row.text) == ("warn", "pCPU 6 is assigned to web and db")
    ended = replace(sandbox, containers=(replace(first, state="stopped"), second))
    assert not list(sandboxes.doubles(ended, "shop/web"))


def test_a_class_of_another_size_is_a_warning() -> None:
    """Pods of `kata-cpus-4` should have 4 exclusive CPUs; other handlers say no number."""
    sandbox = docs.database()
    cpus = sum(len(CpuSet.parse(one.exclusive)) for one in sandbox.containers)
    fits = replace(sandbox, handler=f"kata-cpus-{cpus}")
    assert not list(sandboxes.of_class(fits, "shop/db"))
    assert not list(sandboxes.of_class(replace(sandbox, handler="kata-cpus-x"), "shop/db"))
    other = replace(sandbox, handler=f"kata-qemu-cpus-{cpus + 3}")
    (row,) = sandboxes.of_class(other, "shop/db")
    assert row.status == "warn"
    assert row.text == (
        f"class {other.handler} is for {cpus + 3}, the pod has {cpus} exclusive "
        f"CPU{'s' if cpus != 1 else ''}"
    )
    assert row.remedy == f"kata-pin kata-class --cpus {cpus} --handler kata-qemu"


@pytest.mark.root
@pytest.mark.parametrize(("pinning", "status"), [("true", "warn"), ("false", "ok")])
def test_katas_own_pinning_is_a_warning(tmp_path: Path, pinning: str, status: str) -> None:
    """Two writers of vCPU affinities are told, with what to change."""
    (tmp_path / "configuration.toml").write_text(KATA_CONFIG.format(pinning=pinning))
    (row,) = node.kata(Config(paths=Paths(kata_configs=(str(tmp_path),))))
    assert row.status == status
    assert "default_vcpus 2" in row.text
    assert "extra monitor qmp" in row.text
    assert ("enable_vcpus_pinning = false" in row.remedy) is (status == "warn")


def test_no_kata_configuration_is_a_warning(tmp_path: Path) -> None:
    """The row says where it looked."""
    (row,) = node.kata(Config(paths=Paths(kata_configs=(str(tmp_path),))))
    assert (row.status, str(tmp_path) in row.text) == ("warn", True)


def test_spool_leftovers_are_counted(tmp_path: Path) -> None:
    """Messages that no daemon took in are a warning."""
    config = Config(runtime_dir=str(tmp_path))
    assert node.spool(config).status == "info"
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / "1-2.msg.tmp").touch()
    assert node.spool(config).status == "ok"
    (spool / "1-2.msg").touch()
    assert node.spool(config).text == f"1 pending message in {spool}"
    (spool / "uninstalled").touch()
    assert "kata-pin was uninstalled" in node.spool(config).text


def rows_of(sandbox: Sandbox, config: Config | None = None) -> dict[str, Row]:
    """Return the rows of one sandbox by their check."""
    return {row.check: row for row in sandboxes.sandboxes(docs.state(sandbox), config or Config())}


def test_a_sandbox_in_order() -> None:
    """Roles from a certain source and every reachable mode are ok."""
    rows = rows_of(docs.database(), Config(housekeeping=CpuSet([0, 1])))
    assert rows["vCPUs"].text == "3 identified by debugfs (3)"
    assert rows["overhead"].text == (
        "usable modes: auto (shared CPUs), auto (kubelet's default set), sandbox, housekeeping, "
        "reserve:k"
    )


def test_a_vm_locked_into_its_cpuset() -> None:
    """Where the cgroup allows the sandbox's CPUs only, the others are named as out of reach."""
    threads = [
        docs.thread(1, "vcpu", "4", vcpu=0, cpuset="4-5"),
        docs.thread(2, "emulator", "4-5", cpuset="4-5"),
    ]
    sandbox = docs.sandbox("a/b", "4-5", *threads, exclusive="4-5", shared="")
    row = rows_of(sandbox, Config(housekeeping=CpuSet([0])))["overhead"]
    assert row.text == (
        "usable modes: sandbox, reserve:k; not usable: auto (kubelet's default set), housekeeping "
        "(cgroups allow 4-5)"
    )


def test_a_mode_works_only_if_every_thread_gets_there() -> None:
    """One thread that is locked in takes a mode away."""
    threads = [
        docs.thread(1, "emulator", "4", cpuset="4-5"),
        docs.thread(2, "virtiofsd", "4", cpuset="0-15"),
    ]
    sandbox = docs.sandbox("a/b", "4-5", *threads)
    row = rows_of(sandbox, Config(housekeeping=CpuSet([0])))["overhead"]
    assert "not usable: auto (kubelet's default set), housekeeping" in row.text


def test_inferred_and_contradicting_roles_are_warnings() -> None:
    """Creation order, contradiction and absence each have their text."""
    ordered = docs.sandbox("a/b", "4", docs.thread(1, "vcpu", "4", vcpu=0, source="order"))
    assert rows_of(ordered)["vCPUs"].text == "1 identified by order (1): their order is inferred"
    ordered = replace(ordered, vmm=docs.vmm(kvm=False))
    assert rows_of(ordered)["vCPUs"].remedy == ""
    known = docs.thread(2, "vcpu", "4", vcpu=1)
    row = rows_of(replace(ordered, threads=(*ordered.threads, known)))["vCPUs"]
    assert row.text.startswith("2 identified by order (1), debugfs (1): their order is inferred")
    torn = docs.sandbox("a/b", "4", docs.thread(1, "vcpu", "4", vcpu=0, conflict="qmp: 1"))
    assert rows_of(torn)["vCPUs"].text.endswith("sources disagree")
    assert rows_of(docs.sandbox("a/b", "4"))["vCPUs"].status == "warn"


def test_a_bundle_that_may_not_be_read_is_named() -> None:
    """A container recorded without a cpuset is told with the reason, one that is over is not."""
    outside = "bundle '/data/x' is not read: outside all bundle roots"
    sandbox = docs.sandbox("a/b", "4", containers=[docs.container("app", None, note=outside)])
    row = rows_of(sandbox)["record"]
    assert (row.status, row.text) == ("warn", f"container app: {outside}")
    assert row.remedy == "see paths.bundle_roots"
    ended = docs.container("app", None, note=outside, state="deleted")
    sandbox = docs.sandbox("a/b", "4", containers=[ended])
    assert "record" not in rows_of(sandbox)


def test_monitors(tmp_path: Path) -> None:
    """An extra monitor is seen by its socket; nothing is connected to."""
    sandbox = docs.database()
    config = Config(paths=Paths(vc=str(tmp_path)))
    assert rows_of(sandbox, config)["QMP"].status == "info"
    folder = tmp_path / "vm" / sandbox.id
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as monitor:
        here = os.open(folder, os.O_RDONLY)
        monitor.bind(f"/proc/self/fd/{here}/extra-monitor.sock")
        os.close(here)
        assert rows_of(sandbox, config)["QMP"].status == "ok"
        off = Config(paths=config.paths, qmp=Qmp(enabled=False))
        assert "disabled" in rows_of(sandbox, off)["QMP"].text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "queried only during the pod's first hook"),
        ({"orphan": True}, "Kata's shim, which held QMP's socket, has exited"),
        ({"runtime": KataRuntime.RUST}, "runtime-rs holds QMP's socket"),
    ],
)
def test_when_qmp_is_asked(fields: dict[str, Any], words: str) -> None:
    """The window of the first hook is the Go runtime's, and only while its shim lives."""
    sandbox = docs.database()
    assert sandbox.vmm is not None
    sandbox = replace(sandbox, vmm=replace(sandbox.vmm, **fields))
    assert words in rows_of(sandbox)["QMP"].text


def test_a_sandbox_without_a_vmm_is_one_row() -> None:
    """Only the problem is told."""
    rows = rows_of(docs.lost())
    assert set(rows) == {"VMM"}
    assert "not on the allow-list" in rows["VMM"].text


def test_warnings_of_a_sandbox_are_rows() -> None:
    """Notes of the pass are repeated under their code."""
    assert "2 vCPUs for 4 exclusive CPUs" in rows_of(docs.drifted())["test"].text


def _no_daemon() -> WatchDocument:
    raise DaemonError("no daemon is listening")


def test_a_check_that_breaks_is_a_row(tmp_path: Path) -> None:
    """A root without /proc ends no doctor_node."""
    config = Config(runtime_dir=str(tmp_path))
    ask, watch = Provider(given(config)).state, _no_daemon
    document = node.examine(config, ask, watch, root=HostRoot(str(tmp_path)))
    assert not document.ok
    assert any(row.text.startswith("a check could not run") for row in document.rows)
    assert any(row.check == "kubelet" for row in document.rows)


@pytest.mark.parametrize(("service", "status"), [(True, "fail"), (False, "warn")])
def test_a_service_wants_its_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, *, service: bool
) -> None:
    """Where it is installed nobody is satisfied with the command line alone."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(NodeFiles, "has_service", service)
    config = Config(runtime_dir=str(tmp_path))
    ask, watch = Provider(given(config)).state, _no_daemon
    document = node.examine(config, ask, watch, root=HostRoot(str(tmp_path)))
    assert [row.status for row in document.rows if row.check == "daemon"] == [status]


def test_doctor_exits_1_when_a_row_fails(
    serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The exit status follows the document; the daemon is seen."""
    config = serve({"state": lambda _: docs.state(docs.database())})
    folder = tmp_path / "absent"
    config.write_text(config.read_text() + f"paths: {{kata_configs: [{folder}]}}\n")
    status = run(["doctor", "--config", str(config)])
    out = capsys.readouterr().out
    assert "running, version 0.1.0, pid 812" in out
    assert "no runtime runs the hook" not in out, "NRI is connected"
    assert (status == 1) is (" fail " in out)
    assert HOST.live


@pytest.mark.parametrize(
    ("nri", "status", "text"),
    [
        (None, "info", "disabled"),
        (replace(docs.NRI, connected_s=None, problem="refused"), "info", "nri.sock: refused"),
        (docs.NRI, "ok", "containerd v2.1.4 on /var/run/nri/nri.sock, connected for 26 h"),
    ],
)
def test_the_connection_to_nri_is_told(nri: Nri | None, status: str, text: str) -> None:
    """Connected since when and to what, or why not."""
    state = replace(docs.state(), daemon=replace(docs.RUNNING, nri=nri))
    row = next(row for row in node.connections(state, Config()) if row.check == "NRI")
    assert row.status == status
    assert text in row.text


def test_without_hooks_nri_is_what_counts(tmp_path: Path) -> None:
    """Connected, no hook is missing; where the settings say yes, its absence is a warning."""
    nowhere = (f"{tmp_path}/*.json",)
    assert install.hooks(nowhere, by_nri=True).status == "ok"
    assert install.hooks(nowhere).status == "warn"
    required = replace(Config(), nri=NriSettings(enabled=NriEnabled.YES))
    nri = replace(docs.NRI, connected_s=None)
    away = replace(docs.state(), daemon=replace(docs.RUNNING, nri=nri))
    row = next(row for row in node.connections(away, required) if row.check == "NRI")
    assert row.status == "warn"


def test_where_metrics_are_served_is_told() -> None:
    """The address, or what is in the way; nothing of both without the daemon."""
    state = docs.state()
    rows = {row.check: row for row in node.connections(state, Config())}
    assert (rows["metrics"].status, rows["metrics"].text) == ("ok", docs.METRICS.address)
    taken = Metrics("http://x", "http://x: in use")
    state = replace(state, daemon=replace(docs.RUNNING, metrics=taken))
    rows = {row.check: row for row in node.connections(state, Config())}
    assert rows["metrics"].status == "warn"
    state = replace(state, daemon=replace(docs.RUNNING, metrics=None))
    rows = {row.check: row for row in node.connections(state, Config())}
    assert rows["metrics"].status == "info"
    assert list(node.connections(docs.without_daemon(state), Config())) == []


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
def test_how_cpusets_reach_containers(push: Push, status: str, text: str) -> None:
    """By which way, why not by a better one, and what does not work."""
    (row,) = node.cpusets(docs.allotted(push=push))
    assert row.status == status
    assert text in row.text


def test_nothing_of_cpusets_where_none_are_decided() -> None:
    """Without an allocator, without a daemon, and while it is suspended."""
    assert list(node.cpusets(docs.state())) == []
    for fields in ({"push": None}, {"suspended": "the kubelet's CPU manager policy is static"}):
        assert list(node.cpusets(docs.allotted(**fields))) == []


def test_other_writers_are_named() -> None:
    """Who, by which evidence, how often, since when; a Kata that rests is no warning."""
    kata, other = sandboxes.writers(docs.drifted(), "pod")
    assert (kata.status, other.status) == ("info", "warn")
    assert "persist.json" in kata.text
    assert "changed affinities 4 times since 3 m ago (tid 5101, 5102)" in other.text
    acting = docs.sandbox("p", "1", writers=[docs.writer("kata", active=True, evidence="e")])
    (row,) = sandboxes.writers(acting, "pod")
    assert (row.status, row.text) == ("warn", "Kata pins the vCPUs (e)")


def test_what_keeps_a_vmm_on_its_pcpus() -> None:
    """Its cgroup's cpuset, or affinity alone: then Kata's setting is named."""
    loose = docs.database()
    row = sandboxes.confined(loose, CpuSet.parse("0-7"), "pod")
    assert row.status == "info"
    assert row.text.startswith("only affinity keeps the VMM off pCPUs")
    assert "sandbox_cgroup_only = true" in row.remedy
    threads = tuple(replace(one, cpuset=loose.mask or "") for one in loose.threads)
    held = sandboxes.confined(replace(loose, threads=threads), CpuSet.parse("0-7"), "pod")
    assert (held.status, held.remedy) == ("ok", "")
    assert "cpuset of its cgroup" in held.text
    moved = replace(docs.drifted(), mask="1")
    assert sandboxes.confined(moved, CpuSet.parse("0-7"), "pod").status == "warn"


DEAD = Daemon(running=False, reason="no daemon is listening")
HUNG = Daemon(running=False, reason="no answer", silent=True)
START = "systemctl start kata-pin"


@pytest.mark.parametrize(
    ("daemon", "wanted", "status", "remedy"),
    [
        (docs.RUNNING, True, "ok", ""),
        (DEAD, True, "fail", f"{START}; if it stops again, journalctl -u kata-pin says why"),
        (DEAD, False, "warn", f"{START}; if it stops again, journalctl -u kata-pin says why"),
        (HUNG, False, "fail", "systemctl restart kata-pin"),
    ],
)
def test_the_remedy_of_a_daemon_fits_its_state(
    daemon: Daemon, status: str, remedy: str, *, wanted: bool
) -> None:
    """One that is down is started; starting one that hangs would do nothing."""
    row = node.daemon_row(daemon, wanted=wanted)
    assert (row.status, row.remedy) == (status, remedy)


def test_a_daemon_with_a_wrong_configuration_is_not_started() -> None:
    """Starting it does nothing: systemd tries again until the configuration is corrected."""
    wrong = ConfigError("no such setting", file="/etc/x.yaml", key="cpus")
    row = node.daemon_row(DEAD, wanted=True, wrong=wrong)
    assert row.text.endswith("it does not start with this configuration")
    assert row.remedy == "see the row configuration"
