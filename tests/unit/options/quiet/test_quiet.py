"""What disturbs exclusive pCPUs, from a state document and a large host of files."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.support.quiethost import QuietHost
from tests.unit.cli import documents as docs
from tests.unit.conftest import Doctor

STATE = docs.state(
    docs.sandbox(
        "shop/db", "4-5", docs.thread(4101, "vcpu", "4", vcpu=0), exclusive="4-5", shared=""
    )
)


@pytest.fixture
def node(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """A node whose time stands still while something is counted."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    doctor.state = STATE
    return doctor


def test_a_busy_host(node: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates come from two readings, each pCPU has its own."""
    host = QuietHost(node.files, cpus=16, interrupts=40, more={})
    fire: Callable[[float], None] = lambda _: host.fire(700)  # noqa: E731
    monkeypatch.setattr(time, "sleep", fire)
    quiet = node.json("show", "--cpus")["quiet"]
    four, five = quiet["cpus"]
    assert (four["cpu"], four["owner"], five["cpu"]) == (4, "shop/db", 5)
    assert [(one["number"], one["kind"]) for one in four["interrupts"]] == [
        (104, "movable"),
        (120, "managed"),
        (136, "managed"),
    ]
    assert all(one["per_s"] > 0 for one in four["interrupts"])
    assert four["tick_per_s"]
    assert four["softirqs"]["RCU"] > 0
    assert (four["kernel_threads"], four["nohz_full"], four["idle_limit"]) == (1, True, "0")
    assert (four["governor"], four["frequency_with"]) == ("powersave", "4-5")
    rows = {row["check"]: row for row in quiet["rows"]}
    assert rows["interrupts"]["status"] == rows["managed interrupts"]["status"] == "warn"
    assert "eth0 rx-0 (rps_cpus)" in rows["RPS and XPS"]["text"]
    assert "echo 2 > " in rows["RPS and XPS"]["remedy"]
    assert rows["CPU quota"]["sandbox"] == "shop/db"


def test_nothing_is_exclusive(node: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read and nobody waits."""
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waits"))
    node.state = docs.state()
    quiet = node.json("show", "--cpus")["quiet"]
    assert (quiet["cpus"], quiet["rows"]) == ([], [])
    assert node.row("quiet pCPUs").status == "info"


def test_it_can_be_off(node: Doctor) -> None:
    """Then doctor says no more than that, and nothing of one sandbox."""
    assert "quiet: off" in node.row("quiet pCPUs", quiet="off").text
    rows = node(STATE.sandboxes[0].id, quiet="off")
    assert not any(row.check == "quiet pCPUs" for row in rows)


def test_a_host_that_shows_nothing(node: Doctor) -> None:
    """Each thing is not readable or not there; none is fine."""
    quiet = node.json("show", "--cpus")["quiet"]
    assert quiet["problems"]
    assert [one["interrupts"] for one in quiet["cpus"]] == [None, None]
    assert (quiet["cpus"][0]["tick_per_s"], quiet["cpus"][0]["softirqs"]) == (None, None)
    assert [row["check"] for row in quiet["rows"] if row["status"] == "ok"] == []
