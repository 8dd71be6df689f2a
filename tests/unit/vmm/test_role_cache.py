"""What a second look may change in a thread's role, and when there is a second look."""

from __future__ import annotations

import os
import time

import pytest

from kata_pin.base.cpuset import EMPTY
from kata_pin.base.sandbox import Role, Task
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import RoleSource, ThreadRole
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
            _vcpu(1, RoleSource.NAME, "name reported vcpu 1, then vcpu 2"),
            id="a role never changes: a source that does is a contradiction",
        ),
        pytest.param(
            _vcpu(1, RoleSource.NAME, "name reported vcpu 1, then vcpu 2"),
            _vcpu(3, RoleSource.NAME),
            _vcpu(1, RoleSource.NAME, "name reported vcpu 1, then vcpu 2"),
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


def _learn(cache: RoleCache, roles: dict[Task, Role], boot: int = 0) -> None:
    cache.learn({task.key: role for task, role in roles.items()}, list(roles), boot)


def test_when_the_sources_are_asked_again() -> None:
    """For new threads, young unnamed ones and missing vCPUs; not for settled sandboxes."""
    old, young = _task(10, age_s=1000), _task(11, age_s=0)
    cache = RoleCache()
    assert cache.recall([old]) is None
    _learn(cache, {old: REST})
    assert cache.recall([old]) == {old.key: REST}
    assert cache.recall([old, young]) is None
    _learn(cache, {old: REST}, boot=1)
    assert cache.recall([old]) is None
    _learn(cache, {old: REST, young: REST})
    assert cache.recall([old, young]) is None
    _learn(cache, {old: REST, young: _vcpu(0, RoleSource.DEBUGFS)}, boot=1)
    assert cache.recall([old, young]) is not None
    assert cache.vcpus([old, young]) == {young.key: 0}


def test_one_that_grows_up_while_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was young when the kernel told what it does: that may not yet be what it was made for."""
    task, cache = _task(11, age_s=1.9), RoleCache()
    assert cache.recall([task]) is None
    assert cache.to_ask([task], missing=False) == [task]
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "clock_gettime", lambda _clock: now_s + 0.5)
    _learn(cache, {task: REST})
    assert cache.recall([task]) is None
    assert cache.to_ask([task], missing=False) == [task]
    _learn(cache, {task: REST})
    assert cache.recall([task]) == {task.key: REST}


def test_threads_that_are_gone_are_forgotten() -> None:
    """Of the threads that the last pass did not list nothing is kept."""
    one, two = _task(10, age_s=1000), _task(11, age_s=1000)
    cache = RoleCache()
    assert cache.recall([one, two]) is None
    _learn(cache, {one: REST, two: REST})
    cache.prune()
    assert cache.get(two.key) == REST
    assert (cache.recall([one]) or {})[one.key] == REST
    cache.prune()
    assert (cache.get(one.key), cache.get(two.key)) == (REST, None)
