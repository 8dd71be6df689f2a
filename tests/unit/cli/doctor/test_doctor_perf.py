"""`doctor` on perf events and schedulers: what the service, the node and the kernel permit."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.measured import WatchedPcpu
from tests.unit.conftest import Doctor


@pytest.mark.root
@pytest.mark.parametrize(("restriction", "status"), [("2", "ok"), ("-1", "ok"), ("3", "warn")])
def test_a_kernel_to_which_cap_perfmon_is_not_enough(
    doctor: Doctor, restriction: str, status: str
) -> None:
    """Debian's and Ubuntu's give perf events to CAP_SYS_ADMIN only, above 2."""
    doctor.write("sys/devices/system/cpu/online", "0-1")
    doctor.write("proc/sys/kernel/perf_event_paranoid", restriction)
    row = doctor.row("task switches")
    assert row.status == status
    assert ("kernel.perf_event_paranoid=2" in row.remedy) is (status == "warn")


def test_what_the_daemon_lacks_is_told(doctor: Doctor) -> None:
    """Its own word counts: a service without the right, a daemon that sees nothing, or is away."""
    assert doctor.rows("watch") == []
    doctor.host = None
    assert doctor.rows("watch", runtime_dir=str(doctor.folder / "away")) == []
    pcpu = WatchedPcpu(4, "p1", "a/b", 1.0, None, None, None, None, None, None, None)
    doctor.watch = replace(doctor.watch, pcpus=(pcpu,))
    row = doctor.row("watch")
    assert (row.status, row.text) == ("ok", "watches 1 exclusive pCPU")
    doctor.watch = replace(doctor.watch, problem="Permission denied")
    row = doctor.row("watch")
    assert (row.status, "CAP_PERFMON" in row.remedy) == ("warn", True)


@pytest.mark.parametrize(
    ("files", "status", "text"),
    [
        ({}, None, ""),
        ({"state": "disabled"}, "ok", "no sched_ext scheduler is loaded"),
        ({"state": "enabled", "root/ops": "lavd_1.0.5"}, "warn", "lavd_1.0.5 is enabled"),
        ({"state": "enabling"}, "warn", "of unknown name is enabling"),
    ],
)
def test_a_scheduler_of_sched_ext_is_named(
    doctor: Doctor, files: dict[str, str], status: str | None, text: str
) -> None:
    """Affinities hold under it; which thread runs is its own choice."""
    for name, content in files.items():
        doctor.write(f"sys/kernel/sched_ext/{name}", content)
    rows = doctor.rows("scheduler")
    assert [row.status for row in rows] == ([] if status is None else [status])
    assert all(text in row.text for row in rows)
