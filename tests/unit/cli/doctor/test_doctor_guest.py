"""What `doctor` says of guests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.base.config.tree import Config, Guest
from kata_pin.base.documents.state import Sandbox
from kata_pin.cli.doctor.sandboxes import guests
from tests.unit.cli import documents as docs

ON = Config()
WRONG = "1 of 2 containers is not on its assigned guest CPUs"
HIDDEN = "1 of its own vCPUs has no guest CPU that may be acted on"


def rows(sandbox: Sandbox, config: Config = ON) -> list[tuple[str, str, str]]:
    """Return check, status and text of one sandbox's rows."""
    found = guests(docs.state(sandbox), config)
    return [(row.check, row.status, row.text) for row in found if row.sandbox]


def test_told_and_known() -> None:
    """A guest that was told and whose CPUs are known is all well."""
    assert rows(docs.database()) == [
        ("guest", "ok", "cpusets applied in the guest"),
        ("guest CPUs", "ok", "2 proven, 1 measured"),
    ]


def test_what_is_missing() -> None:
    """Unknown and inferred links, and a container that runs anywhere, are named."""
    assert rows(docs.drifted()) == [
        (
            "guest",
            "warn",
            f"cpusets not in force in the guest: {WRONG}",
        ),
        ("guest CPUs", "warn", "1 proven, 1 unknown, 1 inferred"),
        ("guest", "warn", f"container feed may run on any guest CPU: {HIDDEN}"),
    ]


def test_nothing_of_its_own() -> None:
    """Where no container has vCPUs of its own, an inferred number is no matter."""
    alone = docs.sandbox(
        "a/b",
        "4",
        guest=docs.links((0, "4", 0, "inferred", ""), state="idle"),
    )
    assert [status for _, status, _ in rows(alone)] == ["ok", "info"]
    assert rows(docs.lost()) == []


@pytest.mark.parametrize(
    ("state", "status"),
    [("denied", "warn"), ("unreachable", "warn"), ("pending", "info"), ("off", "info")],
)
def test_states(state: str, status: str) -> None:
    """A denial and silence are to be looked at, and each has a remedy."""
    one = docs.sandbox("a/b", "4", guest=docs.links((0, "4", 0, "proven", "c"), state=state))
    row = next(row for row in guests(docs.state(one), ON) if row.sandbox)
    assert row.status == status
    assert bool(row.remedy) is (status == "warn")


def test_the_host(tmp_path: Path) -> None:
    """Switched off is information; without vhost_vsock guests of QEMU are unreachable."""
    off = Config(guest=Guest(enabled=False))
    assert next(guests(docs.state(), off)).text == "disabled by guest.enabled"
    away = next(guests(docs.state(), ON, devices=(str(tmp_path / "none"),)))
    assert away.status == "warn"
    assert "guests of QEMU are unreachable" in away.text
