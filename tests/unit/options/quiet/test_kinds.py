"""Each kind of tunable is read, and has a goal where the kernel's own work is kept off."""

from __future__ import annotations

from pathlib import Path

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.cpuset import CpuSet, HostTopology
from kata_pin.base.values import QuietLevel
from kata_pin.options.quiet.kernel_work import WORK_KINDS, KernelWork
from kata_pin.options.quiet.values import QuietState
from tests.support.worktree import WorkTree


async def test_each_kind_is_observed_and_has_a_goal(tmp_path: Path) -> None:
    """Of a node that has a file of each: tests/boundary/test_quiet.py sees it set and restored."""
    tree = WorkTree(tmp_path, 8)
    tree.add_thread(77, "kswapd0", "0-7")
    config = Config(quiet=QuietLevel.FULL, quiet_idle_us=20, quiet_governor="performance")
    work = KernelWork(tree.host, LiveConfig(config))
    seen = await work.observe(fresh=True)
    assert {one.key.kind for one in seen} == WORK_KINDS
    everyone, quiet = CpuSet(range(8)), CpuSet({4, 5})
    state = QuietState(quiet, everyone - quiet, quiet)
    goals = work.goals(HostTopology((), everyone, everyone), state, (), seen)
    assert {key.kind for key in goals} == WORK_KINDS
