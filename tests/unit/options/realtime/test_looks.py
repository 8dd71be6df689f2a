"""When a look after an audit may change a sandbox's classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from kata_pin.base.config.tree import Config, LiveConfig, Rt
from kata_pin.base.counters import RtNode
from kata_pin.base.placement import Cause, PassOutcome, Report
from kata_pin.options.realtime import RealtimeVcpus
from tests.unit.options.realtime.test_realtime import GOOD, VCPU, placed


class Looking(RealtimeVcpus):
    """Says over which sandboxes a look went."""

    looked: tuple[str, ...] = ()

    def _node(self, *_: Any) -> RtNode:
        return GOOD

    def _settle(self, sandbox_id: str, *_: Any) -> None:
        self.looked += (sandbox_id,)


def looking(cache: SimpleNamespace) -> Looking:
    core: Any = SimpleNamespace(
        root=None,
        live=LiveConfig(replace(Config(), rt=Rt("fifo:1"))),
        registry=SimpleNamespace(run=lambda _: None),
        sandboxes=SimpleNamespace(ids=["pod"], cache=lambda _: cache),
        index=None,
    )
    keeper = Looking(core)
    keeper._managed.add("pod")
    return keeper


def test_a_look_waits_for_the_pass_that_runs() -> None:
    """Threads are on their way meanwhile: what the former pass found counts no more."""
    cache = SimpleNamespace(report=Report("pod", (VCPU,), placed()), passing=True)
    keeper = looking(cache)
    keeper.look()
    assert not keeper.looked
    cache.passing = False
    keeper.look()
    assert keeper.looked == ("pod",)


def test_a_released_sandbox_is_looked_at_no_more() -> None:
    """Its pass restores classes; audits give none again."""
    report = Report("pod", (VCPU,), placed())
    keeper = looking(SimpleNamespace(report=report, passing=False))
    keeper.passed(PassOutcome("pod", "shop/web", "released", report, Cause()))
    keeper.look()
    assert keeper.looked == ("pod",)
