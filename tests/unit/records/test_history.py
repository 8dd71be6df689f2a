"""The history keeps what changed, nothing else, and no more than its settings say."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import (
    Action,
    ActionResult,
    Cause,
    PassOutcome,
    Placement,
    Report,
    SandboxMask,
)
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import ChangeState, Outcome
from kata_pin.records.containers import Registry
from kata_pin.records.history import History
from kata_pin.records.pins import Pins

ONE = CpuSet.parse("1")
TWO = CpuSet.parse("2")


def _passed(
    sandbox: str = "s1", mask: str | None = "1", *, moved: int = 0, state: ChangeState = "ok",
    pod: str = "shop/web", cause: Cause | None = None,
) -> PassOutcome:  # fmt: skip
    """Return a pass that left a mask, and moved so many threads."""
    results = [
        ActionResult(Action(ThreadKey(1, tid, 1), ONE, TWO, "test"), Outcome.DONE, ONE)
        for tid in range(moved)
    ]
    cpus = None if mask is None else CpuSet.parse(mask)
    placement = Placement(sandbox, SandboxMask(cpus))
    report = Report(sandbox, placement=placement, results=tuple(results))
    return PassOutcome(sandbox, pod, state, report, cause or Cause(("test",), time.monotonic()))


class Kept:
    """A registry's file and the history in it, opened again and again."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "registry.db")
        self.live = LiveConfig(Config())
        self.open()

    def open(self) -> None:
        """Open it, as a daemon that starts does."""
        self.registry = Registry(self.path, boot_id="b")
        self.history = History(self.registry, self.live)

    def again(self) -> None:
        """Restart."""
        self.registry.close()
        self.open()

    def rows(self) -> list[tuple[str, str, str | None, int]]:
        """Return the main facts of every row."""
        return [(c.sandbox, c.state, c.mask, c.moved) for c in self.history.changes()]


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    """Yield an empty history."""
    one = Kept(tmp_path)
    yield one
    one.registry.close()


def test_a_name_that_comes_later_is_the_first_rows_too(kept: Kept) -> None:
    """A VM that is only starting has no pod name yet; another sandbox's rows stay as they are."""
    kept.history.passed(_passed("s1", pod="s1"))
    kept.history.passed(_passed("s2", pod="s2"))
    kept.history.passed(_passed("s1", mask="2", pod="shop/web"))
    assert [(c.sandbox, c.pod) for c in kept.history.changes()] == [
        ("s1", "shop/web"),
        ("s2", "s2"),
        ("s1", "shop/web"),
    ]
    assert len(kept.history.changes("shop/web")) == 2


@pytest.mark.parametrize("between", ["restart", "records lost", "ended"])
def test_a_name_that_comes_again_is_every_rows_too(kept: Kept, between: str) -> None:
    """Whatever was known of the name before: no row stays without it."""
    kept.history.passed(_passed("s1", pod="shop/web"))
    if between == "ended":
        kept.history.ended(_passed("s1", pod="shop/web"))
    kept.history.passed(_passed("s1", mask="2", pod="s1"))
    if between == "restart":
        kept.again()
    kept.history.passed(_passed("s1", mask="3", pod="shop/web"))
    assert {change.pod for change in kept.history.changes()} == {"shop/web"}


def test_a_set_that_changed_nothing_is_no_move(kept: Kept) -> None:
    """A thread that the kernel left where it was has not been moved."""
    kept.history.passed(_passed(moved=1))
    action = Action(ThreadKey(1, 1, 1), ONE, TWO, "test")
    refused = [
        ActionResult(action, Outcome.REFUSED, TWO),
        ActionResult(action, Outcome.CLIPPED, TWO),
    ]
    same = _passed()
    report = Report("s1", placement=same.report.placement, results=tuple(refused))
    kept.history.passed(PassOutcome("s1", "shop/web", "ok", report, same.cause))
    assert len(kept.rows()) == 1


def test_another_runtimes_container_leaves_no_row(kept: Kept) -> None:
    """A sandbox that never had a VMM was never ours."""
    kept.history.passed(_passed(mask=None, state="no-vmm"))
    kept.history.ended(_passed(mask=None, state="no-vmm"))
    assert kept.rows() == []


def test_a_table_of_another_form_is_made_anew(kept: Kept) -> None:
    """What an other version wrote costs its rows and no record."""
    kept.registry.run("CREATE TABLE history (number INTEGER, what TEXT)")
    kept.again()
    kept.history.passed(_passed(moved=1))
    assert len(kept.rows()) == 1


def test_a_file_without_the_table_is_no_reason_to_begin_anew(kept: Kept) -> None:
    """A registry of a version that knew no history is taken as it is; a copy has none, too."""
    Pins(kept.registry).set_released(["s9"], released=True)
    kept.again()
    kept.history.passed(_passed(moved=1))
    assert Pins(kept.registry).released() == {"s9"}
    with closing(Registry.copy_of(kept.path, boot_id="b")) as copy:
        assert len(History(copy, LiveConfig(Config())).changes()) == 1
    with closing(Registry.copy_of(kept.path + "-none", boot_id="b")) as nothing:
        assert History(nothing, LiveConfig(Config())).changes() == ()


def test_a_history_that_cannot_be_written_disturbs_nobody(kept: Kept) -> None:
    """A full disk leaves a gap: it is counted, and the next row is written when there is room."""
    kept.history.passed(_passed(moved=1))
    database = kept.registry
    pages = database.rows("PRAGMA page_count")[0][0]
    database.run(f"PRAGMA max_page_count = {pages}")
    for number in range(200):
        kept.history.passed(_passed(f"s{number}", moved=1, pod="x" * 500))
    assert kept.history.failures > 0
    assert not database._connection.in_transaction
    database.run("PRAGMA max_page_count = 1073741823")
    before = len(kept.rows())
    kept.history.passed(_passed("after", moved=7))
    assert kept.rows()[before:] == [("after", "ok", "1", 7)]
    with closing(sqlite3.connect(kept.path)) as other:
        assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
