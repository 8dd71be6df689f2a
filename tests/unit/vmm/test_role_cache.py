"""What a second look may change in a thread's role, and when there is a second look."""

from __future__ import annotations

import os
import time

import pytest

from kata_pin.model.cpuset import EMPTY
from kata_pin.model.thread import Role, RoleSource, Task, ThreadKey, ThreadRole
from kata_pin.vmm.role_cache import RoleCache, better

TICKS = os.sysconf("SC_CLK_TCK")


def _vcpu(index: int, source: RoleSource, conflict: str = "") -> Role:
    return Role(ThreadRole.VCPU, source, vcpu=index, conflict=conflict)


REST = Role(ThreadRole.EMULATOR, RoleSource.REST)
DOUBTED = Role(ThreadRole.EMULATOR, RoleSource.REST, conflict="may be a vCPU")


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        pytest.param(
            _vcpu(1, RoleSource.ORDER),
            _vcpu(1, RoleSource.DEBUGFS),
            _vcpu(1, RoleSource.DEBUGFS),
            id="a better source replaces a weaker one",
        ),
        pytest.param(
            _vcpu(1, RoleSource.QMP), REST, _vcpu(1, RoleSource.QMP), id="what is known stays"
        ),
        pytest.param(DOUBTED, REST, REST, id="a doubt is dropped"),
        pytest.param(REST, DOUBTED, DOUBTED, id="a doubt is added"),
        pytest.param(
            _vcpu(1, RoleSource.DEBUGFS),
            _vcpu(1, RoleSource.DEBUGFS, "qmp says vcpu 2"),
            _vcpu(1, RoleSource.DEBUGFS, "qmp says vcpu 2"),
            id="a contradiction is added",
        ),
        pytest.param(
            _vcpu(1, RoleSource.NAME),
            _vcpu(2, RoleSource.NAME),
            _vcpu(1, RoleSource.NAME, "name said vcpu 1, then vcpu 2"),
            id="a role never changes: a source that does is a contradiction",
        ),
        pytest.param(
            _vcpu(1, RoleSource.NAME, "name said vcpu 1, then vcpu 2"),
            _vcpu(3, RoleSource.NAME),
            _vcpu(1, RoleSource.NAME, "name said vcpu 1, then vcpu 2"),
            id="the first contradiction stays",
        ),
    ],
)
def test_better(old: Role, new: Role, kept: Role) -> None:
    """Knowledge only grows."""
    assert better(old, new) == kept


def _task(tid: int, age_s: float) -> Task:
    starttime = int((time.clock_gettime(time.CLOCK_BOOTTIME) - age_s) * TICKS)
    return Task(ThreadKey(10, tid, starttime), "x", 0, EMPTY, EMPTY, "/")


def test_when_to_look_again() -> None:
    """New threads, young unnamed ones and missing vCPUs need a look; settled sandboxes do not."""
    old, young = _task(10, age_s=1000), _task(11, age_s=0)
    cache = RoleCache()
    assert cache.needs_look([old], 0)
    cache.learn({old.key: REST})
    assert not cache.needs_look([old], 0)
    assert cache.needs_look([old], 1)
    assert cache.needs_look([old, young], 0)
    cache.learn({young.key: REST})
    assert cache.needs_look([old, young], 0)
    cache.learn({young.key: _vcpu(0, RoleSource.DEBUGFS)})
    assert not cache.needs_look([old, young], 1)
    assert cache.vcpus == {young.key: 0}
    cache.keep_only([old.key])
    assert cache.get(young.key) is None
    assert cache.get(old.key) == REST
