"""Every errno and every race of setting an affinity has its outcome."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kata_pin.base.counters import PF_NO_SETAFFINITY
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import HostError
from kata_pin.base.placement import Action
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import Outcome
from kata_pin.linux.affinity import apply_all
from tests.support.hosttree import FakeHost


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    fake = FakeHost(tmp_path)
    fake.process(10, threads=3)
    return fake


def to(cpus: str, tid: int = 11, starttime: int = 100) -> Action:
    return Action(ThreadKey(10, tid, starttime), CpuSet.parse(cpus), CpuSet.parse("0-3"), "test")


def test_done(host: FakeHost) -> None:
    """The affinity is set and read back; no other thread's changes."""
    result = apply_all(host.root, [to("1-2")])[0]
    assert (result.outcome, str(result.after)) == (Outcome.DONE, "1-2")
    assert host.calls.affinities == {10: {0, 1, 2, 3}, 11: {1, 2}, 12: {0, 1, 2, 3}}


def test_clipped_by_the_cpuset(host: FakeHost) -> None:
    """A target wider than the cpuset is set, and what the kernel left of it is told."""
    host.calls.cpusets[11] = frozenset({1})
    result = apply_all(host.root, [to("1-2")])[0]
    assert (result.outcome, str(result.after)) == (Outcome.CLIPPED, "1")


def test_refused_outside_the_cpuset(host: FakeHost) -> None:
    """EINVAL is a refusal and changes nothing."""
    host.calls.cpusets[11] = frozenset({1})
    assert apply_all(host.root, [to("2-3")])[0].outcome is Outcome.REFUSED
    assert host.calls.affinities[11] == {0, 1, 2, 3}


def test_empty_target_is_refused(host: FakeHost) -> None:
    """An empty target reaches no thread."""
    assert apply_all(host.root, [to("")])[0].outcome is Outcome.REFUSED


def test_denied(host: FakeHost) -> None:
    """EPERM is the missing capability."""
    host.calls.refuse[11] = errno.EPERM
    assert apply_all(host.root, [to("1")])[0].outcome is Outcome.DENIED


def test_what_the_broker_does_not_accept(host: FakeHost) -> None:
    """EACCES is its policy's answer: no capability would help."""
    host.calls.refuse[11] = errno.EACCES
    assert apply_all(host.root, [to("1")])[0].outcome is Outcome.UNVERIFIED


def test_fixed_kernel_thread(host: FakeHost) -> None:
    """EINVAL from a kernel thread that nobody may move is no refusal by a cpuset."""
    host.process(50, flags=0x0020_0000 | PF_NO_SETAFFINITY)
    host.calls.refuse[50] = errno.EINVAL
    action = Action(ThreadKey(50, 50, 100), CpuSet([1]), CpuSet(), "test")
    assert apply_all(host.root, [action])[0].outcome is Outcome.FIXED


def test_gone_before(host: FakeHost) -> None:
    """A thread that is not there is gone, and so is one of a process that is not there."""
    assert apply_all(host.root, [to("1", tid=13)])[0].outcome is Outcome.GONE
    host.end(10)
    assert apply_all(host.root, [to("1")])[0].outcome is Outcome.GONE


def test_zero_never_means_ourselves(host: FakeHost) -> None:
    """A tid of 0, the caller itself for the system call, is a thread that does not exist."""
    host.calls.affinities[0] = frozenset({0})
    assert apply_all(host.root, [to("1", tid=0)])[0].outcome is Outcome.GONE
    assert host.calls.affinities[0] == {0}


def test_reused_before(host: FakeHost) -> None:
    """A tid that belongs to a later thread is not touched."""
    host.thread(10, 11, starttime=200)
    assert apply_all(host.root, [to("1")])[0].outcome is Outcome.REUSED
    assert host.calls.affinities[11] == {0, 1, 2, 3}


def test_reused_during_the_call(host: FakeHost) -> None:
    """A tid that changes hands between the look and the call is reported, not undone."""
    host.calls.before_set = lambda tid: host.thread(10, tid, starttime=300)
    assert apply_all(host.root, [to("1")])[0].outcome is Outcome.REUSED
    assert host.calls.affinities[11] == {1}


def test_dies_during_the_call(host: FakeHost) -> None:
    """A thread that dies between the look and the call is gone (ESRCH)."""
    host.calls.refuse[11] = errno.ESRCH
    assert apply_all(host.root, [to("1")])[0].outcome is Outcome.GONE


def test_unknown_errno_is_an_error(host: FakeHost) -> None:
    """An errno that sched_setaffinity(2) does not list is raised with the thread's number."""
    host.calls.refuse[11] = errno.ENOSYS
    with pytest.raises(HostError, match="thread 11") as caught:
        apply_all(host.root, [to("1")])[0]
    assert caught.value.errno == errno.ENOSYS


def test_one_failure_does_not_stop_the_rest(host: FakeHost) -> None:
    """apply_all answers every action, in order."""
    results = apply_all(host.root, [to("1", tid=99), to("1"), to("9", tid=12), to("2", tid=10)])
    assert [r.outcome for r in results] == [
        Outcome.GONE,
        Outcome.DONE,
        Outcome.REFUSED,
        Outcome.DONE,
    ]
