"""The spool: order, identity, damage, and noticing arrivals."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from kata_pin.records.hooks import MAX_FILE_BYTES, Spool
from tests.support.spooled import leave, message, pending, watching


def test_sorted_by_stamp(tmp_path: Path) -> None:
    """Messages come in the order of their stamps, which is not that of their names."""
    stamps = (1000, 9, 20, 30, 4, 700, 21, 5)  # no file system lists all of these in order
    for stamp in stamps:
        leave(tmp_path, message(stamp))
    assert pending(tmp_path) == [message(stamp) for stamp in sorted(stamps)]


def test_done_removes(tmp_path: Path) -> None:
    """A message comes again until it is done, and done twice is no error."""
    leave(tmp_path, message(1))
    spool = Spool(str(tmp_path))
    [entry] = spool.pending()
    assert pending(tmp_path) == [message(1)]
    spool.done(entry)
    spool.done(entry)
    assert pending(tmp_path) == []


def test_vanishing_message(tmp_path: Path) -> None:
    """A message that disappears between list and read is skipped."""
    leave(tmp_path, message(1))
    second = leave(tmp_path, message(2))
    entries = Spool(str(tmp_path)).pending()
    assert next(entries) == message(1)
    second.unlink()
    assert list(entries) == []


def test_absent_folder(tmp_path: Path) -> None:
    """No folder, no messages; `prepare` makes one for root alone."""
    spool = Spool(str(tmp_path / "spool"))
    assert list(spool.pending()) == []
    spool.prepare()
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_other_name(path: Path) -> None:
    path.rename(path.with_name("5-5.msg"))


def damage_future(path: Path) -> None:
    path.unlink()
    leave(path.parent, message(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 10**12))


def damage_huge(path: Path) -> None:
    os.truncate(path, MAX_FILE_BYTES + 1)


def damage_symlink(path: Path) -> None:
    target = path.with_name("target.tmp")
    path.rename(target)
    path.symlink_to(target)


def damage_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def damage_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def damage_owner(path: Path) -> None:
    os.chown(path, 65534, -1)


def damage_foreign_name(path: Path) -> None:
    path.rename(path.with_name("core"))


@pytest.mark.parametrize(
    "damage",
    [damage_cut, damage_empty, damage_other_name, damage_future, damage_huge, damage_symlink,
     damage_fifo, damage_folder, pytest.param(damage_owner, marks=pytest.mark.root),
     damage_foreign_name],
)  # fmt: skip
def test_bad_entry_is_set_aside(tmp_path: Path, damage: object) -> None:
    """An unreadable file is moved to `bad` at once and does not delay the others."""
    assert callable(damage)
    damage(leave(tmp_path, message(1)))
    leave(tmp_path, message(2))
    spool = Spool(str(tmp_path))
    assert list(spool.pending()) == [message(2)]
    assert len(list((tmp_path / "bad").iterdir())) == 1
    assert list(spool.pending()) == [message(2)]


def test_bad_entries_are_bounded(tmp_path: Path) -> None:
    """Only the newest bad entries are kept."""
    spool = Spool(str(tmp_path), max_bad=2)
    for stamp in range(1, 6):
        damage_empty(leave(tmp_path, message(stamp)))
        assert list(spool.pending()) == []
    assert sorted(p.name for p in (tmp_path / "bad").iterdir()) == ["4-7.msg", "5-7.msg"]


def test_a_retired_spool(tmp_path: Path) -> None:
    """What tells hooks not to use it is no message, and stays until a daemon prepares it."""
    spool = Spool(str(tmp_path))
    spool.retire()
    assert pending(tmp_path) == []
    assert [one.name for one in tmp_path.iterdir()] == ["uninstalled"]
    spool.prepare()
    assert not list(tmp_path.iterdir())


def test_unfinished_files(tmp_path: Path) -> None:
    """A file being written is left alone; one that a killed hook left is removed in time."""
    young, old = tmp_path / "1-1.tmp", tmp_path / "2-2.tmp"
    young.touch()
    old.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    assert pending(tmp_path) == []
    assert young.exists()
    assert not old.exists()


async def test_watch_tells_of_arrivals(tmp_path: Path) -> None:
    """The watch yields for a message that appears, not for one that is being written."""
    async with watching(tmp_path) as news:
        (tmp_path / "1-1.tmp").write_bytes(b"half")
        leave(tmp_path, message(1))
        await anext(news)
        assert pending(tmp_path) == [message(1)]


async def test_watch_survives_a_new_folder(tmp_path: Path) -> None:
    """A folder that is removed and made again, as by an installation, is watched again."""
    folder = tmp_path / "spool"
    async with watching(folder) as news:
        shutil.rmtree(folder)
        await anext(news)
        leave(folder, message(1))
        await anext(news)
        assert pending(folder) == [message(1)]
