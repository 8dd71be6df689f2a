"""The file of orders on a real file system: reading, changing, following."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kata_pin.base.errors import StateError
from kata_pin.base.values import CpuClass
from kata_pin.options.allocation.orders import Orders, OrdersFile


def _set(pod: str, cpu_class: CpuClass) -> Callable[[Orders], None]:
    return lambda orders: orders.update({pod: cpu_class})


def test_no_file_is_no_orders(tmp_path: Path) -> None:
    """An absent file, or folder, orders nothing."""
    assert OrdersFile(str(tmp_path / "none/policies")).read() == {}


def test_a_change_is_whole_and_kept(tmp_path: Path) -> None:
    """A change makes the folder, keeps what is there, and leaves no other file behind."""
    file = OrdersFile(str(tmp_path / "new/policies"))
    file.change(_set("shop/web", CpuClass.SHARE))
    file.change(_set("shop/db", CpuClass.EXCLUSIVE))
    assert file.read() == {"shop/web": CpuClass.SHARE, "shop/db": CpuClass.EXCLUSIVE}
    assert os.listdir(tmp_path / "new") == ["policies"]
    assert (tmp_path / "new/policies").stat().st_mode & 0o777 == 0o644


def test_no_change_is_no_write(tmp_path: Path) -> None:
    """An override that exists already does not change the file."""
    file = OrdersFile(str(tmp_path / "policies"))
    file.change(_set("shop/web", CpuClass.SHARE))
    before = (tmp_path / "policies").stat()
    file.change(_set("shop/web", CpuClass.SHARE))
    assert (tmp_path / "policies").stat().st_ino == before.st_ino


def test_changes_at_once_are_all_kept(tmp_path: Path) -> None:
    """Two commands at the same time do not overwrite each other."""
    file = OrdersFile(str(tmp_path / "policies"))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: file.change(_set(f"p{n}", CpuClass.SHARE)), range(40)))
    assert len(file.read()) == 40


@pytest.mark.parametrize("trouble", ["a wrong line", "a symlink", "a folder"])
def test_what_cannot_be_read_is_not_overwritten(tmp_path: Path, trouble: str) -> None:
    """A file that is no file of orders is refused with its name, and stays as it is."""
    path = tmp_path / "policies"
    if trouble == "a folder":
        path.mkdir()
    elif trouble == "a symlink":
        (tmp_path / "other").write_text("shop/web share\n")
        path.symlink_to(tmp_path / "other")
    else:
        path.write_text("shop/web often\n")
    with pytest.raises(StateError, match=str(path)):
        OrdersFile(str(path)).read()
    with pytest.raises(StateError, match=str(path)):
        OrdersFile(str(path)).change(_set("shop/db", CpuClass.NONE))
    assert not path.is_file() or "db" not in path.read_text()


async def test_changes_are_followed(tmp_path: Path) -> None:
    """Every way to change the file is noticed: our command, an editor's write, a removal."""
    path = tmp_path / "policies"
    file = OrdersFile(str(path))
    seen: list[Orders] = []
    changed = asyncio.Event()

    async def follow() -> None:
        async for _ in file.watch():
            seen.append(file.read())
            changed.set()

    async def until(wanted: Orders) -> None:
        async with asyncio.timeout(10):
            while not seen or seen[-1] != wanted:
                changed.clear()
                await changed.wait()

    task = asyncio.create_task(follow())
    await until({})
    file.change(_set("shop/web", CpuClass.SHARE))
    await until({"shop/web": CpuClass.SHARE})
    path.write_text("shop/web none\n")
    await until({"shop/web": CpuClass.NONE})
    path.unlink()
    await until({})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
