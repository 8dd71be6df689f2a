"""What the broker writes of the kernel's, and how it refuses everything else."""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path

import pytest

from kata_pin.broker.operations import Operations
from kata_pin.broker.policy import Policy
from kata_pin.broker.protocol import NUMBER
from kata_pin.broker.tunables import (
    MAX_REQUEST,
    MAX_WRITES,
    TunableWrite,
    TunableWritten,
    ask_irqbalance,
    batched_writes,
    parse_writes,
    parse_written,
    render_writes,
    render_written,
    write_tunables,
)


def test_what_is_sent_is_what_is_read() -> None:
    """Both ways."""
    writes = [TunableWrite("interrupt", "24", "0-3,8"), TunableWrite("default-mask", "", "f")]
    assert parse_writes(render_writes(writes)) == writes
    written = [TunableWritten(0, "0-3,8"), TunableWritten(errno.EIO)]
    assert parse_written(render_written(written)) == written


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"interrupt 24",
        b"interrupt ../24 0-3",
        b"interrupt 24/../../x 0",
        b"interrupt  0-3",
        b"interrupt 24 0-3 ",
        b"interrupt 24 all",
        b"interrupt 24 ",
        b"interrupt 24 0,,1",
        b"interrupt -1 0",
        b"default-mask 1 f",
        b"default-mask  0x3",
        b"default-mask  f,",
        b"sysctl kernel.core_pattern x",
        b"interrupt 24 0\n\n",
        b"interrupt \xd9\xa1 0",
        b"rps ../../x/rx-0 f",
        b"rps ../rx-0 f",
        b"rps ./rx-0 f",
        b"rps eth0/../rx-0 f",
        b"rps eth0/rx-0/../x f",
        b"rps eth0/tx-0 f",
        b"rps eth0 f",
        b"xps eth0/rx-0 f",
        b"workqueues x f",
        b"workqueues  0-3",
        b"watchdog  ",
        b"idle-limit 4 -1",
        b"idle-limit 4/../5 0",
        b"governor 4 ../x",
        b"governor x performance",
        b"kernel-thread 33 0-3",
        b"kernel-thread 0:1 0-3",
        b"kernel-thread 33:1 ",
        b"\n".join([b"interrupt 24 0"] * (MAX_WRITES + 1)),
    ],
)
def test_requests_without_sense(request_: bytes) -> None:
    """No path, no other kind, no other form of a value."""
    with pytest.raises(ValueError):  # noqa: PT011 - what the broker answers with EINVAL
        parse_writes(request_)


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


def test_values_are_read_back(tmp_path: Path) -> None:
    """One that fails does not stop the others; a link is not followed."""
    irq = tmp_path / "proc" / "irq"
    for number in ("24", "25"):
        (irq / number).mkdir(parents=True)
        (irq / number / "smp_affinity_list").write_text("0-3\n")
    (tmp_path / "secret").write_text("untouched")
    (irq / "26").mkdir()
    (irq / "26" / "smp_affinity_list").symlink_to(tmp_path / "secret")
    writes = [TunableWrite("interrupt", name, "1") for name in ("24", "99", "26", "25")]
    done = write_tunables(writes, str(tmp_path))
    assert [one.errno for one in done] == [0, errno.ENOENT, errno.ELOOP, 0]
    assert (irq / "25" / "smp_affinity_list").read_text().startswith("1\n")
    assert (tmp_path / "secret").read_text() == "untouched"


@pytest.fixture
def balancer(tmp_path: Path) -> tuple[Path, socket.socket]:
    """A folder as irqbalance's, with a socket of pid 7."""
    folder = tmp_path / "irqbalance"
    folder.mkdir(mode=0o755)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "irqbalance7.sock"))
    listening.listen()
    return folder, listening


@pytest.mark.skipif(os.geteuid() != 0, reason="irqbalance's folder is root's")
def test_irqbalance_is_asked_as_root(balancer: tuple[Path, socket.socket]) -> None:
    """Its own format, with the credentials that it looks at."""
    folder, listening = balancer
    with listening:
        for banned, text in ((None, b"setup"), ("2,5-7", b"settings cpus 2,5-7"),
                             ("", b"settings cpus NULL")):  # fmt: skip
            with ask_irqbalance(7, banned, str(folder)):
                end, _ = listening.accept()
                with end:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                    data, [(_, kind, credentials)], _, _ = end.recvmsg(100, 100)
                    assert (data, kind) == (text, socket.SCM_CREDENTIALS)
                    assert struct.unpack("=iII", credentials)[:2] == (os.getpid(), 0)
        with pytest.raises(ValueError, match="list"):
            ask_irqbalance(7, "1; ban irqs 3", str(folder))
        with pytest.raises(FileNotFoundError):
            ask_irqbalance(8, None, str(folder))
        folder.chmod(0o777)
        with pytest.raises(PermissionError):
            ask_irqbalance(7, None, str(folder))


@pytest.mark.parametrize("data", [b"", b"\7\0\0\0", b"\7\0\0\0!", b"\7\0\0\0?1", b"\7\0\0\0=x"])
def test_operations_without_sense(data: bytes) -> None:
    """The daemon gets EINVAL for them (channel.py)."""
    with pytest.raises((ValueError, struct.error)):
        Operations(Policy(b"x/usr/bin/true")).run(b"b", data, ())
    assert NUMBER.size == 4


@pytest.mark.parametrize(
    ("pid", "refused"),
    [("self", errno.EPERM), ("1", errno.EPERM)],
)
def test_only_kernel_threads_are_moved(pid: str, refused: int) -> None:
    """No process, not kthreadd itself, and none that started at another time or has ended."""
    pid = str(os.getpid()) if pid == "self" else pid
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    start = stat.rpartition(")")[2].split()[19]
    (done,) = write_tunables([TunableWrite("kernel-thread", f"{pid}:{start}", "0")])
    assert done == TunableWritten(refused)
    (done,) = write_tunables([TunableWrite("kernel-thread", f"{pid}:{int(start) + 1}", "0")])
    assert done == TunableWritten(errno.ESRCH)
    (done,) = write_tunables([TunableWrite("kernel-thread", f"{2**22 + 1}:1", "0")])
    assert done == TunableWritten(errno.ESRCH)
    (done,) = write_tunables([TunableWrite("kernel-thread", f"{pid}:{start}", "1-2-3")])
    assert done == TunableWritten(errno.EINVAL)
