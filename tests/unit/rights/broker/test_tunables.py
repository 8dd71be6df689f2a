"""What the broker writes of the kernel's, and how it refuses everything else."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kata_pin.rights.broker.tunables import (
    MAX_REQUEST,
    MAX_WRITES,
    TunableWrite,
    TunableWritten,
    batched_writes,
    render_writes,
    write_tunables,
)
from kata_pin.rights.calls import Calls


def test_many_writes_become_several_requests() -> None:
    """By their number, and by their length."""
    short = [TunableWrite("interrupt", str(n), "0") for n in range(600)]
    parts = list(batched_writes(short))
    assert [len(part) for part in parts] == [MAX_WRITES, MAX_WRITES, 600 - 2 * MAX_WRITES]
    every_second = ",".join(map(str, range(0, 4000, 2)))
    long = [TunableWrite("interrupt", str(n), every_second) for n in range(9)]
    parts = list(batched_writes(long))
    assert len(parts) > 1
    assert all(len(render_writes(part)) <= MAX_REQUEST for part in parts)
    assert [one for part in parts for one in part] == long
    assert list(batched_writes([])) == []


def test_a_kernel_thread_whose_number_changes_hands_was_not_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended while its affinity was set: what was set may be another thread's."""
    starts, moved = iter(("5", "6")), list[int]()

    def stat(*_: object) -> bytes:
        return f"7 (kworker/0:1) S 2 0 0 0 -1 {0x0020_0000} {'0 ' * 12}{next(starts)} 0".encode()

    monkeypatch.setattr(os, "pread", stat)
    monkeypatch.setattr(os, "sched_setaffinity", lambda tid, _: moved.append(tid))
    (done,) = write_tunables([TunableWrite("kernel-thread", f"{os.getpid()}:5", "0")])
    assert (done, moved) == (TunableWritten(errno.ESRCH), [os.getpid()])


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("governor", "0/../../../../../../victim", "x"),
        ("rps", "../../../../victim/rx-0", "f"),
        ("workqueues", "", "ff;"),
        ("kernel-thread", "1", "0"),
        ("sysctl", "kernel.core_pattern", "x"),
    ],
)
def test_a_row_of_the_registry_is_checked_without_a_broker_too(
    tmp_path: Path, kind: str, name: str, value: str
) -> None:
    """Root's own commands write what the daemon's user stored: no other file, no other value."""
    work = tmp_path / "sys/devices/virtual/workqueue/cpumask"
    work.parent.mkdir(parents=True)
    work.write_text("f\n")
    calls = Calls()
    assert calls.write_tunables([TunableWrite(kind, name, value)], str(tmp_path)) == [
        TunableWritten(errno.EINVAL)
    ]
    assert work.read_text() == "f\n"
