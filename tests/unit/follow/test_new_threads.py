"""New threads of a VMM that inherited a wrong affinity: this process plays the VMM."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import Desired, Placement, Report, SandboxMask
from kata_pin.base.sandbox import ProcessKey, Vmm
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import Outcome
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.follow.threads import confine
from kata_pin.linux.files import HOST
from kata_pin.linux.tasks import starttime

ME = os.getpid()
ALL = os.sched_getaffinity(0)
ONE = CpuSet({min(ALL)})

pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="needs two pCPUs")


@pytest.fixture
def tid() -> Iterator[int]:
    """A thread that may run anywhere."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert thread.native_id is not None
    os.sched_setaffinity(thread.native_id, ALL)
    yield thread.native_id
    end.set()
    thread.join()


def _cache(*, mask: CpuSet | None = ONE, release: bool = False) -> SandboxCache:
    main = ThreadKey(ME, ME, starttime(HOST, ME, ME))
    desired = {main: Desired(ONE, ONE, "overhead", release=release)}
    placement = Placement("p1", SandboxMask(mask), desired)
    vmm = Vmm("qemu", ProcessKey(ME, main.starttime), 1, "/usr/bin/qemu", "test")
    return SandboxCache(vmm=vmm, report=Report("p1", placement=placement))


def test_it_gets_what_the_main_thread_should_have(tid: int) -> None:
    """The next pass reports it; one that has it, and one that has ended, are left."""
    cache = _cache()
    confine(HOST, cache, ME, [tid, 2**22 + 1])
    assert CpuSet(os.sched_getaffinity(tid)) == ONE
    ((action, outcome, after),) = cache.confined
    assert (action.key.tid, action.before, outcome, after) == (tid, CpuSet(ALL), Outcome.DONE, ONE)
    confine(HOST, cache, ME, [tid])
    assert len(cache.confined) == 1


@pytest.mark.parametrize(
    ("cache", "tgid"),
    [
        pytest.param(_cache(mask=None), ME, id="no mask"),
        pytest.param(_cache(release=True), ME, id="released"),
        pytest.param(_cache(), 1, id="a helper's"),
        pytest.param(SandboxCache(), ME, id="no pass yet"),
    ],
)
def test_it_is_left(tid: int, cache: SandboxCache, tgid: int) -> None:
    """Where the last pass set nothing, or not the VMM's threads."""
    confine(HOST, cache, tgid, [tid])
    assert os.sched_getaffinity(tid) == ALL
