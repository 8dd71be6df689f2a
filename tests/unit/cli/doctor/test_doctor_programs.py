"""`doctor` on programs of the node: real processes under the names that matter."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.state import Row, State
from kata_pin.cli.doctor.install import narrow_runtimes, programs
from kata_pin.cli.reports import who
from tests.support.waiting import wait_for
from tests.unit.cli import documents as docs


@contextmanager
def named(folder: Path, name: str, *arguments: str) -> Iterator[int]:
    """Run a process of that name until its input ends."""
    program = folder / name
    program.symlink_to(shutil.which("cat") or "/bin/cat")
    with subprocess.Popen(
        [program, "-", *arguments], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: who.command(process.pid), name)
        yield process.pid
        process.communicate(timeout=10)


def rows_naming(pid: int, state: State | None) -> list[Row]:
    """Return the rows that name a process."""
    return [row for row in programs(state) if f"pid {pid}, started " in row.text]


def test_runtimes_are_listed(tmp_path: Path) -> None:
    """With pid and age; it is information only that none runs."""
    with named(tmp_path, "crio") as pid:
        (row,) = rows_naming(pid, docs.state())
    assert row.status == "ok"


def test_a_narrow_runtime_is_a_warning(tmp_path: Path) -> None:
    """Its shims and VMs inherit its CPUs; one that may use all is in order."""
    usual = CpuSet(os.sched_getaffinity(0))
    with named(tmp_path, "crio") as pid:
        assert not narrow_rows(pid, usual)
        os.sched_setaffinity(pid, [min(usual)])
        (row,) = narrow_rows(pid, usual)
        assert not narrow_rows(pid, CpuSet([min(usual)]))
    assert row.status == "warn"
    others = usual - CpuSet([min(usual)])
    assert f"may run on {min(usual)} only, not on {others}: VMs that it starts" in row.text
    assert "AllowedCPUs= and CPUAffinity=" in row.remedy


def test_a_narrow_shim_is_a_warning(tmp_path: Path) -> None:
    """But not where the setting overhead_roles gives shims CPUs of their own."""
    usual = CpuSet(os.sched_getaffinity(0))
    with named(tmp_path, "containerd-shim-kata-v2") as pid:
        os.sched_setaffinity(pid, [min(usual)])
        assert len(narrow_rows(pid, usual)) == 1
        assert not narrow_rows(pid, usual, shims=False)


def narrow_rows(pid: int, usual: CpuSet, *, shims: bool = True) -> list[Row]:
    """Return the rows about a process's CPUs."""
    return [row for row in narrow_runtimes(usual, shims=shims) if f"(pid {pid})" in row.text]


def test_programs_that_interfere_are_rows_of_their_own(tmp_path: Path) -> None:
    """What it does, and what helps."""
    with named(tmp_path, "numad") as pid:
        (row,) = rows_naming(pid, None)
    assert (row.status, row.remedy) == ("warn", "systemctl disable --now numad")
    assert row.text.endswith("): sets affinities of large processes")


def test_a_second_daemon_is_a_warning(tmp_path: Path) -> None:
    """The daemon that answers is none, nor is a command of kata-pin."""
    state = docs.state()
    with named(tmp_path, "kata-pin", "run") as pid:
        (row,) = rows_naming(pid, state)
        assert row.status == "warn"
        own = replace(state, daemon=replace(docs.RUNNING, pid=pid))
        assert rows_naming(pid, own) == []
    os.unlink(tmp_path / "kata-pin")
    with named(tmp_path, "kata-pin", "show") as pid:
        assert rows_naming(pid, state) == []


def test_a_daemon_that_starts_is_no_second_one(tmp_path: Path) -> None:
    """While the service restarts no daemon answers, and one that runs may be the only one."""
    for state in (docs.without_daemon(docs.state()), None):
        with named(tmp_path, "kata-pin", "run") as pid:
            (row,) = rows_naming(pid, state)
        os.unlink(tmp_path / "kata-pin")
        assert (row.status, row.remedy) == ("info", "systemctl status kata-pin")
        assert "two daemons" not in row.text


def test_a_daemon_that_hangs_is_no_second_one(tmp_path: Path) -> None:
    """Its own row tells what to do; `stop all but one` would mislead."""
    away = docs.without_daemon(docs.state())
    hung = replace(away, daemon=replace(away.daemon, silent=True))
    with named(tmp_path, "kata-pin", "run") as pid:
        assert rows_naming(pid, away) != []
        assert rows_naming(pid, hung) == []
