"""Events of the node: logged with a MESSAGE_ID, counted, kept within bounds."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.records import history
from kata_pin.records.containers import Registry
from kata_pin.records.history import MAX_TEXT, MESSAGE_IDS, NodeEvents

REFUSED, CONFLICT = NodeEventKind.RELOAD_REFUSED, NodeEventKind.PLUGIN_CONFLICT


def test_an_event_is_logged_counted_and_kept(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the id of its kind, fields and the words; the file outlives the daemon."""
    events = NodeEvents(registry)
    events.report(CONFLICT, "creation of container %s failed", "c1", holder="h")
    events.report(REFUSED, "configuration not reloaded: %s", "mode", level=logging.ERROR)
    assert [one.levelno for one in caplog.records] == [logging.WARNING, logging.ERROR]
    journal = [getattr(one, "journal") for one in caplog.records]  # noqa: B009 - added by `extra`
    assert journal == [
        {"MESSAGE_ID": MESSAGE_IDS[CONFLICT], "HOLDER": "h"},
        {"MESSAGE_ID": MESSAGE_IDS[REFUSED]},
    ]
    assert (events.counts[CONFLICT], events.counts[REFUSED]) == (1, 1)
    registry.close()
    again = Registry(str(tmp_path / "registry.db"), boot_id="b")
    kept = NodeEvents(again).newest(10)
    assert [(one.kind, one.text) for one in kept] == [
        ("plugin-conflict", "creation of container c1 failed"),
        ("reload-refused", "configuration not reloaded: mode"),
    ]
    assert [one.text for one in NodeEvents(again).newest(1)] == [kept[1].text]
    assert NodeEvents(again).newest(10, since_s=0) == ()
    assert len(NodeEvents(again).newest(10, since_s=3600)) == 2
    again.close()


def test_what_is_kept_is_bounded(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest ones, each cut; a lone `%` of others is no placeholder."""
    monkeypatch.setattr(history, "MAX_ROWS", 3)
    events = NodeEvents(registry)
    for number in range(9):
        events.report(REFUSED, f"{number} 100%" + "x" * 2 * MAX_TEXT)
    assert [one.text[:6] for one in events.newest(99)] == ["6 100%", "7 100%", "8 100%"]
    assert {len(one.text) for one in events.newest(99)} == {MAX_TEXT}


def test_a_file_that_cannot_be_written_costs_only_the_row(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    """The event is logged and counted."""
    events = NodeEvents(registry)
    registry.close()
    events.report(REFUSED, "refused")
    assert caplog.messages == ["refused"]
    assert events.counts[REFUSED] == 1


def test_every_kind_has_an_id() -> None:
    """None is logged without one."""
    assert set(MESSAGE_IDS) == set(NodeEventKind)
