"""What a runtime has told of: bounded, by sandbox, and without those left to others."""

from __future__ import annotations

import pytest

from kata_pin.daemon.allocation import known_containers as told
from kata_pin.daemon.allocation.known_containers import Told
from tests.support.allotted import request


def test_who_is_told() -> None:
    """Until its end, or that of everything; who is left to somebody else stays that."""
    known = Told()
    for name in ("a", "b"):
        known.take(request(name), "s-1")
    known.take(request("c"), "s-2")
    known.leave("c-b")
    known.leave("c-unknown")
    known.take(request("b", cpus=2), "s-1")
    assert [one.request.container_id for one in known] == ["c-a", "c-c"]
    assert known.of_sandbox("s-1") == ["c-a", "c-b"]
    known.over("c-a")
    assert known.get("c-a") is None
    known.clear()
    assert list(known) == []


def test_a_runtime_that_tells_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond what Synchronize may tell are not remembered; who is known is followed."""
    monkeypatch.setattr(told, "MAX_CONTAINERS", 1)
    known = Told()
    known.take(request("a"), "s")
    known.take(request("b"), "s")
    known.take(request("a", cpus=2), "s")
    assert [one.request.cpu_millis for one in known] == [2000]
