"""`doctor` on cgroups: what no mount shows is a failure, because no cpuset is known then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hosttree import FakeHost, grow
from tests.unit.cli import documents as docs
from tests.unit.conftest import Doctor

VMM = docs.database().vmm
assert VMM is not None
PID = VMM.pid
HOSTS = "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup2 rw"
V1 = "31 23 0:27 / /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset"


@pytest.fixture(autouse=True)
def sandbox(doctor: Doctor) -> None:
    """The daemon has one sandbox, whose VMM ended."""
    doctor.state = docs.state(docs.database())


def host(folder: Path, *mounts: str, init: str = "0::/init.scope", vmm: int = 0) -> None:
    one = FakeHost(folder)
    one.process(1, cgroup=init)
    if vmm:
        one.process(vmm, cgroup="0::/../vm")
    grow(folder, {"proc/self/mountinfo": "\n".join(mounts)})


def test_visible(doctor: Doctor) -> None:
    """A VMM that ended meanwhile is no failure."""
    host(doctor.files, HOSTS)
    row = doctor.row("cgroups")
    assert (row.status, row.text) == ("ok", f"v2 at {doctor.files}/sys/fs/cgroup")


def test_nothing_mounted(doctor: Doctor) -> None:
    host(doctor.files)
    row = doctor.row("cgroups")
    assert (row.status, row.text) == ("warn", "no cpuset hierarchy is mounted")


@pytest.mark.parametrize(
    ("in_pod", "remedy"), [(False, "--pid host"), (True, "the chart's value paths.cgroup")]
)
def test_process_1_out_of_sight(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, in_pod: bool, remedy: str
) -> None:
    """As in a container that has the runtime's own mount only."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    host(doctor.files, HOSTS, init="0::/../../init.scope")
    row = doctor.row("cgroups")
    assert (row.status, row.sandbox) == ("fail", "")
    assert row.text.startswith("the cgroup of process 1 is not visible (/../../init.scope)")
    assert remedy in row.remedy


def test_a_mount_of_the_other_version_shows_no_cpuset(doctor: Doctor) -> None:
    """On a hybrid node cpusets are in version 1, whatever the unified mount has at that path."""
    host(doctor.files, HOSTS, init="4:cpuset:/init.scope\n0::/init.scope")
    row = doctor.row("cgroups")
    assert row.status == "fail"
    assert row.text.startswith("the cgroup of process 1 is not visible (/init.scope)")


def test_a_vmm_out_of_sight(doctor: Doctor) -> None:
    """One row per sandbox, and none that says ok."""
    host(doctor.files, HOSTS, vmm=PID)
    row = doctor.row("cgroups")
    assert row.status == "fail"
    assert f"the VMM, process {PID}, is not visible" in row.text
    assert row.sandbox


@pytest.mark.parametrize(
    ("content", "row"),
    [
        ("some avg10=0.00 avg60=12.50 avg300=3.00 total=99\nfull avg10=0.00 avg60=0", "warn"),
        ("some avg10=90.00 avg60=9.99 avg300=3.00 total=99\nfull avg10=0.00", "ok"),
        ("nonsense", None),
        (None, None),
    ],
)
def test_threads_that_wait_for_a_cpu(doctor: Doctor, content: str | None, row: str | None) -> None:
    """By the kernel's account of the VMM's cgroup; nothing where that cgroup has none."""
    waiting(doctor.files, HOSTS, content, psi=True)
    rows = doctor.rows("CPU pressure")
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
    doctor: Doctor, mount: str, psi: bool, text: str, remedy: str
) -> None:
    """One row of the node says so, however many VMs there are."""
    waiting(doctor.files, mount, None, psi=psi)
    row = doctor.row("CPU pressure")
    assert (row.status, row.sandbox, row.remedy) == ("info", "", remedy)
    assert text in row.text


def waiting(folder: Path, mount: str, pressure_file: str | None, *, psi: bool) -> None:
    """Grow a host with one VMM, and what its kernel shows of waiting."""
    FakeHost(folder).process(PID, cgroup="0::/vm")
    files = {"proc/self/mountinfo": mount}
    if psi:
        files["proc/pressure/cpu"] = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0"
    if pressure_file is not None:
        files["sys/fs/cgroup/vm/cpu.pressure"] = pressure_file
    grow(folder, files)
