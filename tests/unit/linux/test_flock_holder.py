"""Which process holds a lock, from the kernel's list, which is text with other locks in it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from kata_pin.linux.files import HostRoot
from kata_pin.linux.process import flock_holder

POD = "1f3c9a52-77aa-4b1e-9d34-0123456789ab"


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_a_lock_of_ours(descriptor: int) -> None:
    """The running kernel's own list."""
    assert str(flock_holder(descriptor)) == ""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    holder = flock_holder(descriptor)
    assert holder.pid == os.getpid()
    started = datetime.fromisoformat(holder.since).timestamp()
    assert abs(started - psutil.Process().create_time()) < 3
    assert str(holder).endswith(f", since {holder.since})")


@pytest.mark.parametrize(
    ("cgroup", "said"),
    [
        ("0::/system.slice/kata-pin.service\n", " (process 812 of kata-pin.service)"),
        ("0::/../../../system.slice/kata-pin.service\n", " (process 812 of kata-pin.service)"),
        (
            f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-1.scope",
            f" (process 812 of pod {POD})",
        ),
        (f"4:cpuset:/kubepods/pod{POD}/f00\n1:name=systemd:/", f" (process 812 of pod {POD})"),
        ("0::/\n", " (process 812)"),
        (None, " (process 812)"),
    ],
)  # fmt: skip
def test_whose_process_it_is(
    descriptor: int, tmp_path: Path, cgroup: str | None, said: str
) -> None:
    """A unit of systemd, a pod of either cgroup driver, or only the process; never its waiters."""
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    (tmp_path / "proc/812").mkdir(parents=True)
    (tmp_path / "proc/locks").write_text(
        "1: POSIX  ADVISORY  WRITE 1 fe:00:99 0 EOF\n"
        f"2: POSIX  ADVISORY  WRITE 2 {place} 0 EOF\n"
        f"3: FLOCK  ADVISORY  WRITE 812 {place} 0 EOF\n"
        f"3: -> FLOCK  ADVISORY  WRITE 4 {place} 0 EOF\n"
    )
    if cgroup is not None:
        (tmp_path / "proc/812/cgroup").write_text(cgroup)
    assert str(flock_holder(descriptor, HostRoot(str(tmp_path)))) == said


@pytest.mark.parametrize("text", ["", "1: FLOCK", "1: FLOCK ADVISORY WRITE x y 0 EOF", None])
def test_lists_that_say_nothing(descriptor: int, tmp_path: Path, text: str | None) -> None:
    """The lock is refused all the same, without a name."""
    (tmp_path / "proc").mkdir()
    if text is not None:
        (tmp_path / "proc/locks").write_text(text)
    assert str(flock_holder(descriptor, HostRoot(str(tmp_path)))) == ""
