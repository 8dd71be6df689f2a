"""The audit tells moved, born and gone threads apart, and is quiet otherwise."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kata_pin.base.errors import HostError, ParseError
from kata_pin.base.steps import finish
from kata_pin.linux.affinity import (
    NOTHING,
    AuditFinding,
    ExpectedThread,
    audit_affinity,
    audit_deep,
)
from kata_pin.linux.tasks import list_inodes
from tests.support.hosttree import FakeCalls, FakeHost

ALL = frozenset(range(4))


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    fake = FakeHost(tmp_path)
    fake.process(10, threads=3)
    return fake


def test_nothing_differs(host: FakeHost) -> None:
    """Nothing found is always the same object."""
    finding = finish(audit_affinity(host.root, 10, dict.fromkeys((10, 11, 12), ALL)))
    assert finding is NOTHING


def test_every_difference(host: FakeHost) -> None:
    """A moved, an unexpected and a missing thread are each told by tid."""
    host.calls.affinities[11] = frozenset({3})
    finding = finish(audit_affinity(host.root, 10, dict.fromkeys((10, 11, 99), ALL)))
    assert finding == AuditFinding(moved=(11,), born=(12,), gone=(99,))


def test_gone_process(host: FakeHost) -> None:
    """All threads of a process that is not there are gone."""
    assert finish(audit_affinity(host.root, 7, {7: ALL, 8: ALL})) == AuditFinding(gone=(7, 8))


def test_thread_dies_after_the_listing(host: FakeHost) -> None:
    """A thread that is listed but has no affinity any more is gone; the rest is still compared."""
    del host.calls.affinities[11]
    host.calls.affinities[12] = frozenset({0})
    finding = finish(audit_affinity(host.root, 10, dict.fromkeys((10, 11, 12), ALL)))
    assert finding == AuditFinding(moved=(12,), gone=(11,))


def test_deep_sees_a_reused_tid(host: FakeHost) -> None:
    """The same tid and affinity with another start time is another thread."""
    expected = {tid: ExpectedThread(100, ALL) for tid in (10, 11, 12)}
    assert finish(audit_deep(host.root, 10, expected)) is NOTHING
    host.thread(10, 11, starttime=200)
    host.calls.affinities[12] = frozenset({1})
    finding = finish(audit_deep(host.root, 10, expected))
    assert finding == AuditFinding(moved=(12,), born=(11,), gone=(11,))


def test_deep_reads_only_what_may_be_another_thread(host: FakeHost) -> None:
    """A folder with its inode is the thread that was read; of another one the stat file counts."""
    expected = {tid: ExpectedThread(100, ALL) for tid in (10, 11, 12)}
    inodes = list_inodes(host.root, 10)
    for tid in (10, 11):
        (host.folder / f"proc/10/task/{tid}/stat").write_text("")
    with pytest.raises(ParseError):
        finish(audit_deep(host.root, 10, expected, {10: inodes[10], 12: inodes[12]}))
    assert finish(audit_deep(host.root, 10, expected, inodes)) is NOTHING
    (host.folder / "proc/10/task/11").rename(host.folder / "kept")  # keeps the number taken
    host.thread(10, 11, starttime=200)
    assert finish(audit_deep(host.root, 10, expected, inodes)) == AuditFinding(
        born=(11,), gone=(11,)
    )


def test_other_errors_are_raised(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """An errno that no vanished thread explains is an error, not a finding."""

    def broken(_self: FakeCalls, _tid: int) -> set[int]:
        raise OSError(errno.ENOSYS, "no such system call")

    monkeypatch.setattr(FakeCalls, "get_affinity", broken)
    with pytest.raises(HostError, match="audit process 10"):
        finish(audit_affinity(host.root, 10, {}))
