"""Where kata-pin itself runs: on what is nobody's alone, as that changes."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.placement import Cause, Report, outcome_of
from kata_pin.engine.node import NodeWatch
from kata_pin.hook import FREE_CPUS
from kata_pin.rights.broker.protocol import AffinityChange, Changed
from kata_pin.rights.calls import Calls
from kata_pin.service.process import OwnCpus
from tests.support import world
from tests.support.at_once import place


class Asked:
    """The broker: it does as it is told, unless it has an errno to answer with."""

    def __init__(self) -> None:
        self.errno = 0
        self.cpus: list[frozenset[int]] = []

    def set_affinities(self, changes: Sequence[AffinityChange], proc: str) -> list[Changed]:
        """See Calls."""
        assert proc == "/proc"
        self.cpus += [one.cpus for one in changes]
        return [Changed(self.errno) for _ in changes]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A broker; this process itself, which runs the other tests too, stays where it is."""
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return Asked()


def own(folder: Path, asked: Asked, node: object, granted: CpuSet = EMPTY) -> OwnCpus:
    return OwnCpus(
        str(folder), cast("NodeWatch", node), cast("Calls", asked), os.getpid(), lambda: granted
    )


def shown(folder: Path) -> str:
    return str(CpuSet.from_bits(int((folder / FREE_CPUS).read_text(), 16)))


def passed(own_cpus: OwnCpus, cpus: str, *, name: str = "pod", released: bool = False) -> None:
    """Have a pass end over a sandbox with these exclusive pCPUs."""
    sandbox = replace(world.sandbox(world.exclusive("c", cpus)), id=name)
    threads = world.vcpus(0)
    report = Report(name, tuple(threads), place(sandbox, threads, world.node()))
    own_cpus.passed(outcome_of(sandbox, report, Cause(), released=released))


def test_it_follows_passes_grants_and_the_checkpoint(tmp_path: Path, asked: Asked) -> None:
    """A pCPU is left while it is exclusive to anybody, and used again afterwards."""
    node = SimpleNamespace(last=world.node())
    mine = own(tmp_path, asked, node, CpuSet([15]))
    passed(mine, "4-5")
    assert shown(tmp_path) == "0-3,6-14"
    assert asked.cpus[-1] == frozenset(CpuSet.parse("0-3,6-14"))
    passed(mine, "6", name="other")
    assert shown(tmp_path) == "0-3,7-14"
    calls = len(asked.cpus)
    passed(mine, "6", name="other")
    assert len(asked.cpus) == calls, "nothing changed"
    passed(mine, "4-5", released=True)
    assert shown(tmp_path) == "0-5,7-14"
    node.last = replace(world.node(), kubelet=world.kubelet({"app": "8-9"}, pod="10"))
    mine.look()
    assert shown(tmp_path) == "0-5,7,11-14"
    node.last = replace(node.last, claims={"claim": CpuSet([11])})
    mine.look()
    assert shown(tmp_path) == "0-5,7,12-14"


def test_a_node_without_a_free_pcpu_is_used_whole(tmp_path: Path, asked: Asked) -> None:
    """Somewhere kata-pin must run; and where it was confined it stays."""
    mine = own(tmp_path, asked, SimpleNamespace(last=world.node()))
    passed(mine, "0-15")
    assert shown(tmp_path) == "0-15"
    confined = own(tmp_path, asked, SimpleNamespace(last=world.node(world.flat(32))))
    passed(confined, "4")
    assert shown(tmp_path) == "0-3,5-15"


def test_a_failure_is_said_once_and_tried_again(
    tmp_path: Path, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that may not; what ended meanwhile is no failure."""
    mine = own(tmp_path, asked, SimpleNamespace(last=world.node()))
    asked.errno = errno.EPERM
    with caplog.at_level(logging.WARNING):
        passed(mine, "4")
        mine.look()
    assert len(caplog.records) == 1
    assert not (tmp_path / FREE_CPUS).exists()
    asked.errno = errno.ESRCH
    mine.look()
    assert shown(tmp_path) == "0-3,5-15"
