"""The hook program's functions that a daemon or a test does not reach through the program."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kata_pin import hook
from kata_pin.peers.oci import Phase
from kata_pin.records import hooks


def _left(folder: Path) -> set[int]:
    """Return where a thread may run that left exclusive CPUs."""
    with ThreadPoolExecutor(1) as other:
        other.submit(hook.leave_exclusive_cpus, str(folder)).result()
        return other.submit(os.sched_getaffinity, 0).result()


def test_exclusive_cpus_are_left(tmp_path: Path) -> None:
    """A hook runs where the daemon says that nobody has exclusive CPUs."""
    last = max(os.sched_getaffinity(0))
    (tmp_path / hook.FREE_CPUS).write_text(f"{1 << last | 1 << 8191:x}\n")
    assert _left(tmp_path) == {last}


@pytest.mark.parametrize("text", ["", "zz", "0", f"{1 << 8191:x}", "f" * 5000])
def test_a_strange_mask_changes_nothing(tmp_path: Path, text: str) -> None:
    """Nor fails the hook: what is no mask, no CPU, or none of this machine."""
    everywhere = os.sched_getaffinity(0)
    (tmp_path / hook.FREE_CPUS).write_text(text)
    assert _left(tmp_path) == everywhere


def test_a_mask_that_is_no_file_changes_nothing(tmp_path: Path) -> None:
    """The daemon's user can put anything there; opening a FIFO would hang."""
    everywhere = os.sched_getaffinity(0)
    assert _left(tmp_path) == everywhere
    file = tmp_path / hook.FREE_CPUS
    os.mkfifo(file)
    assert _left(tmp_path) == everywhere
    file.unlink()
    file.symlink_to("/proc/self/loginuid")
    assert _left(tmp_path) == everywhere


def test_phases_are_those_of_the_wire() -> None:
    """The hook, which imports nothing of the package, knows the same phases, files and bounds."""
    assert set(hook.PHASES) == {phase.value for phase in Phase}
    assert set(hook.PINNED_PHASES) == {p.value for p in Phase if p.waits_for_pins}
    assert (hook.MAX_STATE_BYTES, hook.UNINSTALLED) == (hooks.MAX_BODY, hooks.UNINSTALLED)


def test_a_spool_that_nobody_reads_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of messages, and by the age of the oldest."""
    assert hook.MAX_SPOOLED == hooks.MAX_SPOOLED
    monkeypatch.setattr(hook, "MAX_SPOOLED", 3)
    newest = 5 + hook.MAX_SPOOLED_NS
    (tmp_path / "5-1.msg").touch()
    (tmp_path / f"{newest}-1.msg").touch()
    with pytest.raises(OSError, match="more than a day"):
        hook.spool(str(tmp_path), f"{newest + 1}-2", b"x")
    (tmp_path / "6-1.msg").touch()
    with pytest.raises(OSError, match="3 messages are waiting"):
        hook.spool(str(tmp_path), "7-2", b"x")
    assert sorted(os.listdir(tmp_path)) == ["5-1.msg", "6-1.msg", f"{newest}-1.msg"]
