"""Which memory is moved where, and that it makes room for hooks and passes."""

from __future__ import annotations

import asyncio
import os
from errno import EPERM, ESRCH
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.state import Memory
from kata_pin.base.placement import Cause, Desired, Placement, Report, SandboxMask, outcome_of
from kata_pin.base.sandbox import ProcessKey, Thread
from kata_pin.base.settings import MemoryMode
from kata_pin.base.values import ContainerState
from kata_pin.linux.topology import read_topology
from kata_pin.options.memory import keeper as module
from kata_pin.options.memory.keeper import MemoryGoal, MemoryMover, _Held, near_nodes
from kata_pin.options.memory.report import memory_moves
from kata_pin.records.history import NodeEvents
from tests.support import world
from tests.support.hosttree import grow, listing

NOTHING = cast("Any", None)


async def test_hooks_and_passes_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves while a hook waits; passes alone are waited for a while."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.s))
    passes = SimpleNamespace(any_awaited=True, any_due=True)

    async def sleep(seconds: float) -> None:
        now.s += seconds
        passes.any_awaited = now.s < 2 * module.PASSES_S

    mover = MemoryMover(NOTHING, NOTHING, NOTHING, cast("Any", passes), NOTHING, NOTHING, sleep)
    await mover._let_others()
    assert 2 * module.PASSES_S <= now.s < 2 * module.PASSES_S + 2 * module.LOOK_S
    began = now.s
    await mover._let_others()
    assert module.PASSES_S <= now.s - began < module.PASSES_S + 2 * module.LOOK_S


def test_doctor_names_a_kernel_that_refuses_moves(tmp_path: Path) -> None:
    """And the right that is missing."""

    def probe() -> None:
        raise OSError(EPERM, os.strerror(EPERM))

    root = grow(tmp_path, {"sys/devices/system/node/has_memory": "0-1"})
    (row,) = memory_moves(replace(Config(), memory=MemoryMode.MIGRATE), root, probe)
    assert (row.status, "CAP_SYS_NICE" in row.remedy) == ("warn", True)
    assert "move_pages is refused: Operation not permitted" in row.text


def _desired(thread: Thread, *, paired: bool) -> Desired:
    return Desired(thread.task.affinity, thread.task.affinity, "", paired=paired)


@pytest.mark.parametrize(("first", "second", "nodes"), [(1, 0, "0"), (1, 1, "0-1"), (0, 0, "0-1")])
def test_memory_follows_paired_vcpus(tmp_path: Path, first: int, second: int, nodes: str) -> None:
    """Those without a pCPU of their own count only where none has one."""
    topology = read_topology(grow(tmp_path, listing("two-sockets-smt")))
    near, far = (next(cpu.cpu for cpu in topology.cpus if cpu.node == node) for node in (0, 1))
    vcpus = (world.vcpu(0, on=str(near)), world.vcpu(1, on=str(far)))
    desired = {
        vcpu.key: _desired(vcpu, paired=bool(paired))
        for vcpu, paired in zip(vcpus, (first, second), strict=True)
    }
    placement = Placement(
        "pod", SandboxMask(CpuSet({near, far}), exclusive=CpuSet({near})), desired
    )
    assert str(near_nodes(vcpus, placement, topology)) == nodes


def test_memory_of_an_ended_container_holds_nothing() -> None:
    """What the kubelet gave it is its to give again."""
    runs = replace(world.exclusive("c1", "4"), mems="0")
    ended = replace(runs, id="c2", mems="1", state=ContainerState.STOPPED)
    mover = MemoryMover(NOTHING, NOTHING, NOTHING, NOTHING, lambda _: (runs, ended), NOTHING)
    outcome = outcome_of(world.sandbox(runs), Report("pod"), Cause(), released=False)
    assert str(mover._mems(outcome)) == "0"


@pytest.mark.parametrize(("alive", "problem"), [(True, "No such process"), (False, "")])
async def test_the_end_of_a_vmm_is_no_problem_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool, problem: str
) -> None:
    """The next pass finds that it ended."""
    process = ProcessKey(world.VMM_PID, 5)
    stat = f"{process.pid} (qemu) S {'0 ' * 18}5 {'0 ' * 30}"
    root = grow(tmp_path, {f"proc/{process.pid}/stat": stat} if alive else {"proc/1/stat": ""})
    mover = MemoryMover(
        root, LiveConfig(Config()), NOTHING, NOTHING, NOTHING, NodeEvents(), asyncio.sleep
    )

    async def refused(*_: object) -> None:
        raise ProcessLookupError(ESRCH, "No such process")

    monkeypatch.setattr(mover, "_plan", refused)
    held = _Held(MemoryGoal(process, CpuSet({0}), CpuSet()), Memory("moving", "0", None, 0, ""))
    await mover._settle("pod", held)
    assert held.view.problem == problem
