"""What `doctor` says of guests."""

from __future__ import annotations

import os

import pytest

from kata_pin.base.documents.state import Row, Sandbox
from tests.unit.cli import documents as docs
from tests.unit.conftest import Doctor

WRONG = "1 of 2 containers is not on its assigned guest CPUs"
HIDDEN = "1 of its own vCPUs has no guest CPU that may be acted on"


def rows(doctor: Doctor, sandbox: Sandbox) -> list[Row]:
    """Return what is said of a sandbox's guest."""
    doctor.state = docs.state(sandbox)
    return [row for row in doctor(sandbox.id) if row.sandbox and row.check.startswith("guest")]


def told(doctor: Doctor, sandbox: Sandbox) -> list[tuple[str, str, str]]:
    """Return check, status and text of these rows."""
    return [(row.check, row.status, row.text) for row in rows(doctor, sandbox)]


def test_told_and_known(doctor: Doctor) -> None:
    """A guest that was told and whose CPUs are known is all well."""
    assert told(doctor, docs.database()) == [
        ("guest", "ok", "cpusets applied in the guest"),
        ("guest CPUs", "ok", "2 proven, 1 measured"),
    ]


def test_what_is_missing(doctor: Doctor) -> None:
    """Unknown and inferred links, and a container that runs anywhere, are named."""
    assert told(doctor, docs.drifted()) == [
        (
            "guest",
            "warn",
            f"cpusets not in force in the guest: {WRONG}",
        ),
        ("guest CPUs", "warn", "1 proven, 1 unknown, 1 inferred"),
        ("guest", "warn", f"container feed may run on any guest CPU: {HIDDEN}"),
    ]


def test_nothing_of_its_own(doctor: Doctor) -> None:
    """Where no container has vCPUs of its own, an inferred number is no matter."""
    alone = docs.sandbox(
        "a/b",
        "4",
        guest=docs.links((0, "4", 0, "inferred", ""), state="idle"),
    )
    assert [row.status for row in rows(doctor, alone)] == ["ok", "info"]
    assert rows(doctor, docs.lost()) == []


@pytest.mark.parametrize(
    ("state", "status"),
    [("denied", "warn"), ("unreachable", "warn"), ("pending", "info"), ("off", "info")],
)
def test_states(doctor: Doctor, state: str, status: str) -> None:
    """A denial and silence are to be looked at, and each has a remedy."""
    one = docs.sandbox("a/b", "4", guest=docs.links((0, "4", 0, "proven", "c"), state=state))
    row = rows(doctor, one)[0]
    assert row.status == status
    assert bool(row.remedy) is (status == "warn")


def test_the_host(doctor: Doctor) -> None:
    """Switched off is information; without vhost_vsock guests of QEMU are unreachable."""
    assert doctor.row("guest", guest={"enabled": False}).text == "disabled by guest.enabled"
    row = doctor.row("guest")
    devices = ("/dev/vhost-vsock", "/sys/devices/virtual/misc/vhost-vsock")
    there = any(map(os.path.exists, devices))
    assert row.status == ("ok" if there else "warn")
    assert there or "guests of QEMU are unreachable" in row.text
