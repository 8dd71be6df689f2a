"""Metrics of exclusive pCPUs that there are, and are not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.status.isolation_metrics import IsolationMetrics
from kata_pin.host.process import ProcessIndex
from kata_pin.host.root import HostRoot
from tests.unit.daemon.isolation.test_watch import World


@pytest.mark.parametrize("watch", [True, False])
async def test_what_nobody_watches_is_not_0(tmp_path: Path, *, watch: bool) -> None:
    """Without the watch nobody knows whether others ran there: no series says that none did."""
    world = World(tmp_path, watch=watch)
    metrics = IsolationMetrics(
        HostRoot(str(tmp_path)),
        cast("Sandboxes", SimpleNamespace(tracked=())),
        world.claims,
        world.watch,
        cast("ProcessIndex", SimpleNamespace(all=tuple)),
        None,
    )
    found = {one.name for one in metrics.families() if not callable(one)}
    assert ("kata_pin_foreign_seconds" in found) is watch
    assert ("kata_pin_vcpu_wait" in str(found)) is watch
    assert ("foreign" in await metrics.violations()) is watch
    assert "intruder" in await metrics.violations()
