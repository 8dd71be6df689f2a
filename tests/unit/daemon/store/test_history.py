"""The history keeps what changed, nothing else, and no more than its settings say."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kata_pin.config import Config
from kata_pin.config.tree import History as Limits
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.status.documents import history_report
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.history import History
from kata_pin.daemon.store.pins import Pins
from kata_pin.errors import DaemonError
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.pass_outcome import Cause, PassOutcome
from kata_pin.model.placement import Action, ActionResult, Outcome, Placement, Report, SandboxMask
from kata_pin.model.thread import ThreadKey

ONE = CpuSet.parse("1")
TWO = CpuSet.parse("2")


def _passed(
    sandbox: str = "s1", mask: str | None = "1", *, moved: int = 0, state: str = "ok",
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
        return [(c.sandbox_id, c.state, c.mask, c.moved) for c in self.history.changes()]


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
    assert [(c.sandbox_id, c.pod) for c in kept.history.changes()] == [
        ("s1", "shop/web"),
        ("s2", "s2"),
        ("s1", "shop/web"),
    ]
    assert len(kept.history.changes("shop/web")) == 2


def test_a_pass_over_an_unpinned_sandbox_changes_nothing(kept: Kept) -> None:
    """The undo decides no mask, a later pass does, but sets nothing: that is no change."""
    kept.history.passed(_passed(mask="1"))
    kept.history.passed(_passed(mask=None, state="released"))
    kept.history.passed(_passed(mask="1", state="released"))
    assert kept.rows() == [("s1", "ok", "1", 0), ("s1", "released", None, 0)]


def test_only_changes_are_written(kept: Kept) -> None:
    """A pass after which mask and state are the same and that moved nothing leaves no row."""
    for one in (
        _passed(moved=3), _passed(), _passed(), _passed(moved=1), _passed(mask="1-2"),
        _passed(mask="1-2"), _passed(mask="1-2", state="drift"),
        _passed(mask=None, state="unpinned"),
    ):  # fmt: skip
        kept.history.passed(one)
    assert kept.rows() == [
        ("s1", "ok", "1", 3),
        ("s1", "ok", "1", 1),
        ("s1", "ok", "1-2", 0),
        ("s1", "drift", "1-2", 0),
        ("s1", "unpinned", None, 0),
    ]
    turned = [(c.was_state, c.was_mask) for c in kept.history.changes()]
    assert turned == [("", None), ("ok", "1"), ("ok", "1"), ("ok", "1-2"), ("drift", "1-2")]


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


def test_a_restart_writes_nothing_where_nothing_changed(kept: Kept) -> None:
    """What stood before the restart is known after it."""
    kept.history.passed(_passed(moved=3))
    kept.again()
    kept.history.passed(_passed())
    assert len(kept.rows()) == 1
    kept.history.passed(_passed(mask="3"))
    assert kept.history.changes()[-1].was_mask == "1"


def test_another_runtimes_container_leaves_no_row(kept: Kept) -> None:
    """A sandbox that never had a VMM was never ours."""
    kept.history.passed(_passed(mask=None, state="no-vmm"))
    kept.history.ended(_passed(mask=None, state="no-vmm"))
    assert kept.rows() == []


def test_a_sandbox_that_is_over_keeps_its_rows(kept: Kept) -> None:
    """Its end is written, its rows stay when the registry forgets it, and it may begin anew."""
    kept.history.passed(_passed(moved=1))
    kept.history.ended(_passed(mask=None, state="no-vmm"))
    kept.registry.forget("s1")
    kept.again()
    kept.history.passed(_passed(moved=2))
    assert kept.rows() == [("s1", "ok", "1", 1), ("s1", "gone", None, 0), ("s1", "ok", "1", 2)]
    assert kept.history.changes()[-1].was_state == ""


def test_rows_are_bounded(kept: Kept) -> None:
    """The oldest rows of a sandbox go at its own bound, the oldest of all at the whole one."""
    kept.live.replace(Config(history=Limits(rows=20, sandbox_rows=5)))
    for number in range(30):
        kept.history.passed(_passed("busy", moved=number + 1))
    assert [row[3] for row in kept.rows()] == [26, 27, 28, 29, 30]
    for number in range(18):
        kept.history.passed(_passed(f"one{number}", moved=1))
    rows = kept.rows()
    assert len(rows) == 20
    assert [row[0] for row in rows[:3]] == ["busy", "busy", "one0"]
    kept.again()
    kept.history.passed(_passed("late", moved=1))
    assert len(kept.rows()) == 20
    kept.live.replace(Config(history=Limits(rows=3)))
    kept.history.passed(_passed("later", moved=1))
    assert [row[0] for row in kept.rows()] == ["one17", "late", "later"]


def test_nothing_is_kept_where_none_is_wanted(kept: Kept) -> None:
    """A setting switches it off."""
    kept.live.replace(Config(history=Limits(rows=0)))
    kept.history.passed(_passed(moved=1))
    assert kept.rows() == []


def test_a_row_says_why_and_how_long(kept: Kept) -> None:
    """Its reasons are those of the pass, the wait begins with the first of them, time is UTC."""
    since = time.monotonic() - 0.25
    kept.history.passed(_passed(moved=1, cause=Cause(("hook:createRuntime", "audit"), since)))
    (shown,) = history_report(kept.history.changes()).changes
    assert shown.triggers == ("hook:createRuntime", "audit")
    assert 250 <= shown.latency_ms < 5250
    written = time.strptime(shown.time[:19], "%Y-%m-%dT%H:%M:%S")
    assert 0 <= time.time() - time.mktime(written) + time.timezone < 10
    assert shown.time.endswith("Z")


@pytest.mark.parametrize(
    ("name", "sandboxes"),
    [
        ("", ["abc1", "abd2", "old3"]),
        ("abc1", ["abc1"]),
        ("shop/web", ["abc1", "old3"]),
        ("web", ["abc1", "old3"]),
        ("ab", ["abc1", "abd2"]),
        ("abd", ["abd2"]),
    ],
)
def test_a_name_means_a_pod_or_the_start_of_an_id(
    kept: Kept, name: str, sandboxes: list[str]
) -> None:
    """A pod's name finds the sandbox it had before, too."""
    kept.history.passed(_passed("abc1", moved=1))
    kept.history.passed(_passed("abd2", moved=1, pod="shop/db"))
    kept.history.passed(_passed("old3", moved=1))
    assert [c.sandbox_id for c in kept.history.changes(name)] == sandboxes


@pytest.mark.parametrize("name", ["x", "%", "a_c1", "shop", "' OR 1=1 --"])
def test_a_name_that_means_nothing_is_an_error(kept: Kept, name: str) -> None:
    """It is compared as it is: no pattern, no SQL."""
    kept.history.passed(_passed("abc1", moved=1))
    with pytest.raises(DaemonError, match="no history of"):
        kept.history.changes(name)


def test_newest_rows_and_recent_rows(kept: Kept) -> None:
    """A limit keeps the newest, in order; a span leaves out what is older."""
    for moved in (1, 2, 3):
        kept.history.passed(_passed(moved=moved))
    assert [c.moved for c in kept.history.changes(limit=2)] == [2, 3]
    assert len(kept.history.changes(since_s=3600)) == 3
    assert kept.history.changes(since_s=0) == []


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
        assert History(nothing, LiveConfig(Config())).changes() == []


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
