"""`doctor` on programs of the node: real processes under the names that matter."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.state import Row
from tests.support.waiting import wait_for
from tests.unit.cli import documents as docs
from tests.unit.conftest import Doctor

ONLINE = CpuSet.parse(Path("/sys/devices/system/cpu/online").read_text())
HERE = min(os.sched_getaffinity(0))


@contextmanager
def named(folder: Path, name: str, *arguments: str) -> Iterator[int]:
    """Run a process of that name until its input ends."""
    program = folder / name
    program.symlink_to(shutil.which("cat") or "/bin/cat")
    with subprocess.Popen(
        [program, "-", *arguments], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        comm = Path(f"/proc/{process.pid}/comm")
        wait_for(lambda: comm.read_text() == f"{name[:15]}\n", name)
        yield process.pid
        process.communicate(timeout=10)


@pytest.fixture(autouse=True)
def live(doctor: Doctor) -> None:
    """The processes are those of this machine."""
    doctor.host = None


def rows_naming(doctor: Doctor, pid: int) -> list[Row]:
    """Return the rows that name a process."""
    return [row for row in doctor.rows("programs") if f"pid {pid}, started " in row.text]


def test_runtimes_are_listed(doctor: Doctor, tmp_path: Path) -> None:
    """With pid and age; it is information only that none runs."""
    with named(tmp_path, "crio") as pid:
        (row,) = rows_naming(doctor, pid)
    assert row.status == "ok"


def test_a_narrow_runtime_is_a_warning(doctor: Doctor, tmp_path: Path) -> None:
    """Its shims and VMs inherit its CPUs; one that may use all is in order."""
    with named(tmp_path, "crio") as pid:
        assert (narrow_rows(doctor, pid) == []) is (os.sched_getaffinity(pid) == set(ONLINE))
        os.sched_setaffinity(pid, [HERE])
        (row,) = narrow_rows(doctor, pid)
    assert row.status == "warn"
    others = ONLINE - CpuSet([HERE])
    assert f"may run on {HERE} only, not on {others}: VMs that it starts" in row.text
    assert "AllowedCPUs= and CPUAffinity=" in row.remedy


def test_a_narrow_shim_is_a_warning(doctor: Doctor, tmp_path: Path) -> None:
    """But not where the setting overhead_roles gives shims CPUs of their own."""
    with named(tmp_path, "containerd-shim-kata-v2") as pid:
        os.sched_setaffinity(pid, [HERE])
        assert len(narrow_rows(doctor, pid)) == 1
        assert not narrow_rows(doctor, pid, overhead_roles={"shim": "sandbox"})


def narrow_rows(doctor: Doctor, pid: int, **settings: Any) -> list[Row]:
    """Return the rows about a process's CPUs."""
    rows = doctor.rows("programs", **settings)
    return [row for row in rows if f"(pid {pid}) may run on" in row.text]


def test_programs_that_interfere_are_rows_of_their_own(doctor: Doctor, tmp_path: Path) -> None:
    """What it does, and what helps."""
    with named(tmp_path, "numad") as pid:
        (row,) = rows_naming(doctor, pid)
    assert (row.status, row.remedy) == ("warn", "systemctl disable --now numad")
    assert row.text.endswith("): sets affinities of large processes")


def test_a_second_daemon_is_a_warning(doctor: Doctor, tmp_path: Path) -> None:
    """The daemon that answers is none, nor is a command of kata-pin."""
    with named(tmp_path, "kata-pin", "run") as pid:
        (row,) = rows_naming(doctor, pid)
        assert row.status == "warn"
        doctor.state = replace(docs.state(), daemon=replace(docs.RUNNING, pid=pid))
        assert rows_naming(doctor, pid) == []
    doctor.state = docs.state()
    os.unlink(tmp_path / "kata-pin")
    with named(tmp_path, "kata-pin", "show") as pid:
        assert rows_naming(doctor, pid) == []


def test_a_daemon_that_starts_is_no_second_one(doctor: Doctor, tmp_path: Path) -> None:
    """While the service restarts no daemon answers, and one that runs may be the only one."""
    doctor.state = docs.without_daemon(docs.state())
    with named(tmp_path, "kata-pin", "run") as pid:
        (row,) = rows_naming(doctor, pid)
    assert (row.status, row.remedy) == ("info", "systemctl status kata-pin")
    assert "two daemons" not in row.text


def test_a_daemon_that_hangs_is_no_second_one(doctor: Doctor, tmp_path: Path) -> None:
    """Its own row tells what to do; `stop all but one` would mislead."""
    away = docs.without_daemon(docs.state())
    hung = replace(away, daemon=replace(away.daemon, silent=True))
    with named(tmp_path, "kata-pin", "run") as pid:
        doctor.state = away
        assert rows_naming(doctor, pid) != []
        doctor.state = hung
        assert rows_naming(doctor, pid) == []
