"""What a runtime has reported: bounded, by sandbox, and without containers left to others."""

from __future__ import annotations

import pytest

from kata_pin.options.allocation import ledger as module
from kata_pin.options.allocation.ledger import Ledger
from tests.support.allotted import request


def test_who_is_told() -> None:
    """Until its end, or a disconnection; a container left to another plugin stays so."""
    known = Ledger()
    for name in ("a", "b"):
        known.requested(request(name), "s-1")
    known.requested(request("c"), "s-2")
    known.leave_alone("c-b")
    known.leave_alone("c-unknown")
    known.requested(request("b", cpus=2), "s-1")
    assert [one.container_id for one, _, _ in known.requests()] == ["c-a", "c-c"]
    assert known.of_sandbox("s-1") == ["c-a", "c-b"]
    known.ended("c-a")
    assert known.get("c-a") is None
    known.disconnected()
    assert list(known.requests()) == []


def test_a_runtime_that_tells_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers beyond the limit of Synchronize are not recorded; known ones are followed."""
    monkeypatch.setattr(module, "MAX_CONTAINERS", 1)
    known = Ledger()
    known.requested(request("a"), "s")
    known.requested(request("b"), "s")
    known.requested(request("a", cpus=2), "s")
    assert [one.cpu_millis for one, _, _ in known.requests()] == [2000]
