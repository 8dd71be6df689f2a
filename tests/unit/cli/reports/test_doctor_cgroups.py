"""`doctor` on cgroups: what no mount shows is a failure, because no cpuset is known then."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.cli.reports.doctor_cgroups import cgroups
from kata_pin.host.root import HostRoot
from kata_pin.model.reports.doctor import Row
from tests.support.hosttree import FakeHost, grow
from tests.unit.cli import documents as docs

HOSTS = "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup2 rw"


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
