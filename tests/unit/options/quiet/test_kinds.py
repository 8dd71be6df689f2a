"""Each kind of tunable is read, may be written, is described, and has a goal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.cpuset import CpuSet, HostTopology
from kata_pin.base.values import QuietLevel
from kata_pin.cli.doctor import isolation
from kata_pin.options.quiet.kernel_work import WORK_KINDS, KernelWork
from kata_pin.options.quiet.values import QuietState
from kata_pin.rights.broker.tunables import TUNABLE_FILES
from tests.support.worktree import WorkTree

ROOT = Path(__file__).parents[4]


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


def test_doctor_looks_at_what_the_drop_in_opens() -> None:
    """Which trees the service may write with quiet-full.conf."""
    assert _opened() == {need.path for need in isolation._FULL}


@pytest.mark.parametrize("kind", sorted(WORK_KINDS - {"kernel-thread"}))
def test_the_service_may_write_each_kind_and_its_page_has_it(kind: str) -> None:
    """But for kernel threads, which have no file. /sys/class has links into /sys/devices."""
    path = TUNABLE_FILES[kind].path.replace("/sys/class/net/", "/sys/devices/x/net/")
    assert any(path.startswith(f"{tree}/") or path == tree for tree in _opened())
    assert path.rpartition("/")[2] in (ROOT / "docs/quiet.md").read_text()


def _opened() -> set[str]:
    drop_in = (ROOT / "hooks/systemd/quiet-full.conf").read_text()
    return set(re.findall("^ReadWritePaths=-?(.+)", drop_in, re.MULTILINE))
