"""What disturbs exclusive pCPUs, from a state document and a large host, without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kata_pin.base.config.tree import Config
from kata_pin.base.documents.state import State
from kata_pin.base.values import QuietLevel
from kata_pin.cli.doctor.node import Examined
from kata_pin.linux.files import HostRoot
from kata_pin.options.quiet.disturbance import prerequisites, read_quiet
from kata_pin.service.protocol import decode, encode
from tests.support.quiethost import QuietHost
from tests.unit.cli import documents as docs

SMALL: dict[str, Any] = {"cpus": 16, "interrupts": 40}


def _state() -> State:
    one = docs.sandbox(
        "shop/db", "4-5", docs.thread(4101, "vcpu", "4", vcpu=0), exclusive="4-5", shared=""
    )
    return docs.without_daemon(docs.state(one))


def test_a_busy_host(tmp_path: Path) -> None:
    """Rates come from two readings, each pCPU has its own, and the document can be sent."""
    node = QuietHost(tmp_path, **SMALL, more={})
    state = _state()
    found = replace(state, quiet=read_quiet(state, node.host, lambda _: node.fire(700)))
    assert found.quiet is not None
    four, five = found.quiet.cpus
    assert (four.cpu, four.owner, five.cpu) == (4, "shop/db", 5)
    assert four.interrupts is not None
    assert [(one.number, one.kind) for one in four.interrupts] == [
        (104, "movable"),
        (120, "managed"),
        (136, "managed"),
    ]
    assert all(one.per_s > 0 for one in four.interrupts)
    assert four.tick_per_s
    assert four.softirqs
    assert four.softirqs["RCU"] > 0
    assert (four.kernel_threads, four.nohz_full, four.idle_limit) == (1, True, "0")
    assert (four.governor, four.frequency_with) == ("powersave", "4-5")
    texts = {row.check: row for row in found.quiet.rows}
    assert texts["interrupts"].status == texts["managed interrupts"].status == "warn"
    assert "eth0 rx-0 (rps_cpus)" in texts["RPS and XPS"].text
    assert "echo 2 > " in texts["RPS and XPS"].remedy
    assert texts["CPU quota"].sandbox == "shop/db"
    assert decode(encode(found), State) == found


def test_nothing_is_exclusive(tmp_path: Path) -> None:
    """Nothing is read and nobody waits."""
    state = replace(_state(), sandboxes=())

    def never(_: float) -> None:
        raise AssertionError

    found = read_quiet(state, HostRoot(str(tmp_path)), never)
    assert (found.cpus, found.rows) == ((), ())
    (row,) = prerequisites(Examined(Config(), HostRoot(str(tmp_path)), state))
    assert row.status == "info"


def test_it_can_be_off(tmp_path: Path) -> None:
    """Then doctor says no more than that."""
    off = Examined(Config(quiet=QuietLevel.OFF), HostRoot(str(tmp_path)), _state())
    (row,) = prerequisites(off)
    assert "quiet: off" in row.text
    assert not list(prerequisites(replace(off, node=False)))


def test_a_host_that_shows_nothing(tmp_path: Path) -> None:
    """Each thing is not readable or not there; none is fine."""
    found = read_quiet(_state(), HostRoot(str(tmp_path)), lambda _: None)
    assert found.problems
    assert [one.interrupts for one in found.cpus] == [None, None]
    assert found.cpus[0].tick_per_s is None
    assert found.cpus[0].softirqs is None
    assert [row.check for row in found.rows if row.status == "ok"] == []
