"""`doctor` on cgroups: what no mount shows is a failure, because no cpuset is known then."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.base.config.tree import Config
from kata_pin.base.documents.measured import WatchDocument
from kata_pin.base.documents.state import Row, State
from kata_pin.cli.doctor.node import cgroups, examine, pressure
from kata_pin.linux.files import HostRoot
from tests.support.hosttree import FakeHost, grow
from tests.unit.cli import documents as docs

HOSTS = "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup2 rw"
NOT_WATCHED = WatchDocument(time="", max_foreign_percent=0.1, problem="", pcpus=())
V1 = "31 23 0:27 / /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset"


def host(folder: Path, *mounts: str, init: str = "0::/init.scope", vmm: int = 0) -> HostRoot:
    one = FakeHost(folder)
    one.process(1, cgroup=init)
    if vmm:
        one.process(vmm, cgroup="0::/../vm")
    grow(folder, {"proc/self/mountinfo": "\n".join(mounts)})
    return one.root


def test_visible(tmp_path: Path) -> None:
    (row,) = cgroups(host(tmp_path, HOSTS), None)
    assert (row.status, row.text) == ("ok", f"v2 at {tmp_path}/sys/fs/cgroup")


def test_nothing_mounted(tmp_path: Path) -> None:
    (row,) = cgroups(host(tmp_path), None)
    assert (row.status, row.text) == ("warn", "no cpuset hierarchy is mounted")


@pytest.mark.parametrize(
    ("in_pod", "remedy"), [(False, "--pid host"), (True, "the chart's value paths.cgroup")]
)
def test_process_1_out_of_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_pod: bool, remedy: str
) -> None:
    """As in a container that has the runtime's own mount only."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (row,) = cgroups(host(tmp_path, HOSTS, init="0::/../../init.scope"), None)
    assert (row.status, row.sandbox) == ("fail", "")
    assert row.text.startswith("the cgroup of process 1 is not visible (/../../init.scope)")
    assert remedy in row.remedy


def test_a_mount_of_the_other_version_shows_no_cpuset(tmp_path: Path) -> None:
    """On a hybrid node cpusets are in version 1, whatever the unified mount has at that path."""
    (row,) = cgroups(host(tmp_path, HOSTS, init="4:cpuset:/init.scope\n0::/init.scope"), None)
    assert row.status == "fail"
    assert row.text.startswith("the cgroup of process 1 is not visible (/init.scope)")


def test_a_vmm_out_of_sight(tmp_path: Path) -> None:
    """One row per sandbox, and none that says ok."""
    state = docs.state(docs.database())
    vmm = state.sandboxes[0].vmm
    assert vmm is not None
    (row,) = cgroups(host(tmp_path, HOSTS, vmm=vmm.pid), state)
    assert row.status == "fail"
    assert f"the VMM, process {vmm.pid}, is not visible" in row.text
    assert row.sandbox


def test_a_vmm_that_ended_is_no_failure(tmp_path: Path) -> None:
    rows: list[Row] = [*cgroups(host(tmp_path, HOSTS), docs.state(docs.database()))]
    assert [row.status for row in rows] == ["ok"]


@pytest.mark.parametrize(
    ("content", "row"),
    [
        ("some avg10=0.00 avg60=12.50 avg300=3.00 total=99\nfull avg10=0.00 avg60=0", "warn"),
        ("some avg10=90.00 avg60=9.99 avg300=3.00 total=99\nfull avg10=0.00", "ok"),
        ("nonsense", None),
        (None, None),
    ],
)
def test_threads_that_wait_for_a_cpu(tmp_path: Path, content: str | None, row: str | None) -> None:
    """By the kernel's account of the VMM's cgroup; nothing where that cgroup has none."""
    state = waiting(tmp_path, HOSTS, content, psi=True)
    rows = list(pressure(HostRoot(str(tmp_path)), state))
    assert [one.status for one in rows] == ([] if row is None else [row])
    if row == "warn":
        assert "in 12.5 % of the last minute" in rows[0].text
        assert "kata-pin top default/db-0" in rows[0].remedy


@pytest.mark.parametrize(
    ("mount", "psi", "text", "remedy"),
    [
        (HOSTS, False, "(PSI) is off", "boot with psi=1 (a kernel with CONFIG_PSI)"),
        (V1, True, "cgroup v1 has no cpu.pressure", ""),
    ],
)
def test_waiting_that_is_not_measured(
    tmp_path: Path, mount: str, psi: bool, text: str, remedy: str
) -> None:
    """One row of the node says so, however many VMs there are."""
    (row,) = pressure(HostRoot(str(tmp_path)), waiting(tmp_path, mount, None, psi=psi))
    assert (row.status, row.sandbox, row.remedy) == ("info", "", remedy)
    assert text in row.text


def test_doctor_looks_at_both(tmp_path: Path) -> None:
    """Who schedules, and who waits, are rows of `doctor` itself."""
    state = waiting(tmp_path, HOSTS, "some avg10=0.00 avg60=12.50 avg300=0.00 total=0", psi=True)
    grow(tmp_path, {"sys/kernel/sched_ext/state": "enabled"})
    root = HostRoot(str(tmp_path))
    found = examine(Config(), lambda _: state, lambda: NOT_WATCHED, root=root)
    rows = {row.check: row.status for row in found.rows}
    assert (rows["scheduler"], rows["CPU pressure"]) == ("warn", "warn")


def waiting(folder: Path, mount: str, pressure_file: str | None, *, psi: bool) -> State:
    """Grow a host with one VMM, and what its kernel shows of waiting; return its state."""
    found = docs.database()
    assert found.vmm is not None
    FakeHost(folder).process(found.vmm.pid, cgroup="0::/vm")
    files = {"proc/self/mountinfo": mount}
    if psi:
        files["proc/pressure/cpu"] = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0"
    if pressure_file is not None:
        files["sys/fs/cgroup/vm/cpu.pressure"] = pressure_file
    grow(folder, files)
    return docs.state(found)
