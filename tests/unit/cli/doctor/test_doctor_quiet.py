"""`doctor` on what the daemon may not write, and on writes that failed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.cli import documents as docs
from tests.unit.conftest import Doctor

DROP_INS = "usr/lib/systemd/system/kata-pin.service.d"
RIGHTS = "quiet rights"
PID = 4242
EVERYTHING = 0x1FF_FFFF_FFFF
IRQ: dict[str, Any] = {"quiet": "irq"}
FULL: dict[str, Any] = {"quiet": "full"}
GROUPS: dict[str, Any] = {"resctrl": {"enabled": True}}


@pytest.fixture(autouse=True)
def daemon(doctor: Doctor) -> None:
    """The daemon has a pid of its own."""
    doctor.state = replace(docs.state(), daemon=replace(docs.RUNNING, pid=PID))


def grow(doctor: Doctor, *, closed: str = "", bounds: int = EVERYTHING) -> None:
    """Make a node with a daemon that sees these trees read-only."""
    mounts = ["1 0 8:1 / / rw - ext4 /dev/vda1 rw"]
    mounts += [f"2 1 0:5 / {path} ro - proc proc rw" for path in closed.split()]
    doctor.write(f"proc/{PID}/mountinfo", "\n".join(mounts))
    doctor.write(f"proc/{PID}/status", f"Name:\tkata-pin\nCapBnd:\t{bounds:016x}")
    doctor.write("proc/irq/default_smp_affinity", "f")
    doctor.write("proc/sys/kernel/watchdog_cpumask", "0-3")
    doctor.write("sys/devices/virtual/workqueue/cpumask", "f")


def test_all_is_well(doctor: Doctor) -> None:
    """One row; none at all where nothing is to be written. A tree that is missing is no finding."""
    grow(doctor)
    assert not doctor.rows(RIGHTS)
    row = doctor.row(RIGHTS, **FULL, **GROUPS)
    assert row.status == "ok"
    assert "/sys/devices" in row.text
    assert "resctrl" not in row.text


@pytest.mark.parametrize(
    ("settings", "path", "drop_in"),
    [
        (IRQ, "/proc/irq", "quiet.conf"),
        (FULL, "/sys", "quiet-full.conf"),
        (FULL, "/proc/sys", "quiet-full.conf"),
        (IRQ | GROUPS, "/sys/fs", "resctrl.conf"),
    ],
)
def test_a_read_only_tree(
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    path: str,
    drop_in: str,
) -> None:
    """Named with the drop-in that helps, without any write; in a pod a drop-in does not help."""
    grow(doctor, closed=path)
    (doctor.files / "sys/fs/resctrl").mkdir(parents=True)
    row = doctor.row(RIGHTS, **settings)
    assert (row.status, path in row.text) == ("warn", True)
    assert f"pid {PID}" in row.text
    assert "kata-pin install again" in row.remedy
    assert drop_in in row.remedy
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert "chart's value config" in doctor.row(RIGHTS, **settings).remedy
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    doctor.write(f"{DROP_INS}/{drop_in}", "")
    assert "not in force" in doctor.row(RIGHTS, **settings).remedy


@pytest.mark.parametrize(("settings", "bit", "name"), [(IRQ, 7, "SETUID"), (FULL, 12, "NET_ADMIN")])
def test_a_missing_capability(
    doctor: Doctor, settings: dict[str, Any], bit: int, name: str
) -> None:
    """A service without the drop-in cannot have it."""
    grow(doctor, bounds=EVERYTHING & ~(1 << bit))
    assert f"may not have CAP_{name}" in doctor.row(RIGHTS, **settings).text


def test_what_cannot_be_known(doctor: Doctor) -> None:
    """Without a daemon, or for others than root, nothing is claimed."""
    grow(doctor)
    (doctor.files / f"proc/{PID}/mountinfo").unlink()
    assert doctor.row(RIGHTS, **IRQ).status == "info"
    grow(doctor)
    doctor.state = docs.without_daemon(doctor.state)
    assert doctor.row(RIGHTS, **IRQ).status == "info"


def test_writes_that_failed(doctor: Doctor) -> None:
    """What and why, how many by kind since the start; and what is left to others."""
    kept = docs.kept().kept_quiet
    assert kept is not None
    kept = replace(
        kept,
        failed_writes={"interrupt": 12, "default-mask": 1},
        left=("interrupt 24 (eth0)", "interrupt 25 (sda)"),
        problems=("interrupt 24: No space left on device", "interrupt 25: Device or resource busy"),
    )
    grow(doctor)
    doctor.state = replace(doctor.state, kept_quiet=kept)
    assert doctor.row("quiet writes", **IRQ).text == (
        "cannot set interrupt 24: No space left on device and 1 more; failed writes since the "
        "daemon's start: interrupt 12, default-mask 1"
    )
    assert "interrupt 24 (eth0) and 1 more" in doctor.row("quiet writers", **IRQ).text
    doctor.state = replace(doctor.state, kept_quiet=replace(kept, problems=()))
    row = doctor.row("quiet writes", **IRQ)
    assert (row.status, "13 writes failed" in row.text) == ("info", True)
