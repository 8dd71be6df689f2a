"""`doctor` on perf events and schedulers: what the service, the node and the kernel permit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.measured import WatchDocument, WatchedPcpu
from kata_pin.base.errors import DaemonError
from kata_pin.cli.doctor.isolation import scheduler, task_switches, watch
from kata_pin.linux.files import HostRoot
from kata_pin.rights.calls import Calls
from tests.support.hosttree import grow


class Opens(Calls):
    """Opens every perf event, as for root."""

    def switches(self, cpu: int) -> int:
        """See Calls."""
        return os.open("/dev/null", os.O_RDONLY)


@pytest.mark.parametrize(("restriction", "status"), [("2", "ok"), ("-1", "ok"), ("3", "warn")])
def test_a_kernel_to_which_cap_perfmon_is_not_enough(
    tmp_path: Path, restriction: str, status: str
) -> None:
    """Debian's and Ubuntu's give perf events to CAP_SYS_ADMIN only, above 2."""
    for name, text in (
        ("sys/devices/system/cpu/online", "0-1"),
        ("proc/sys/kernel/perf_event_paranoid", restriction),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"{text}\n")
    row = task_switches(replace(HostRoot(str(tmp_path)), calls=Opens()))
    assert row.status == status
    assert ("kernel.perf_event_paranoid=2" in row.remedy) is (status == "warn")


def test_what_the_daemon_lacks_is_told() -> None:
    """Its own word counts: a service without the right, a daemon that does not answer."""

    def answer(problem: str, watched: bool) -> WatchDocument:
        pcpu = WatchedPcpu(4, "p1", "a/b", 1.0, None, None, None, None, None, None, None)
        return WatchDocument(
            time="", max_foreign_percent=0.1, problem=problem, pcpus=(pcpu,) if watched else ()
        )

    def away() -> WatchDocument:
        raise DaemonError("no daemon")

    (row,) = watch(lambda: answer("Permission denied", watched=True))
    assert (row.status, "CAP_PERFMON" in row.remedy) == ("warn", True)
    (row,) = watch(lambda: answer("", watched=True))
    assert (row.status, row.text) == ("ok", "watches 1 exclusive pCPU")
    assert list(watch(lambda: answer("", watched=False))) == []
    assert list(watch(away)) == []


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
    tmp_path: Path, files: dict[str, str], status: str | None, text: str
) -> None:
    """Affinities hold under it; which thread runs is its own choice."""
    host = grow(tmp_path, {f"sys/kernel/sched_ext/{name}": one for name, one in files.items()})
    rows = list(scheduler(host))
    assert [row.status for row in rows] == ([] if status is None else [status])
    assert all(text in row.text for row in rows)
