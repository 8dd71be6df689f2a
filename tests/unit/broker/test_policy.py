"""What the broker touches, asked in this process: files, folders, sockets and processes."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kata_pin.broker import perf
from kata_pin.broker.operations import Operations
from kata_pin.broker.policy import Policy
from kata_pin.broker.protocol import NUMBER, STATUS, FileStatus
from tests.support.waiting import wait_for


def operations(*rules: str) -> Operations:
    return Operations(Policy(b"\0".join(map(os.fsencode, rules))))


@contextmanager
def running(program: Path) -> Iterator[int]:
    with subprocess.Popen([program, "60"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder that is allowed, beside one that is not."""
    home = tmp_path / "vc"
    (home / "sbs" / "p1").mkdir(parents=True)
    (home / "sbs" / "p1" / "persist.json").write_text("{}")
    (home / "sbs" / "p1" / "secret").write_text("secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_text("secret")
    (home / "sbs" / "link").symlink_to(tmp_path / "outside")
    (home / "sbs" / "p1" / "config.json").symlink_to(tmp_path / "outside" / "config.json")
    os.mkfifo(home / "sbs" / "p1" / "pid")
    return tmp_path


def opened(run: Operations, path: Path | str) -> bytes:
    (fd,) = run.run(b"o", os.fsencode(path), ()).descriptors
    with open(fd, "rb") as file:
        return file.read()


def refused(call: Callable[[], object]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or 0
    raise AssertionError("it was not refused")


def test_files_below_a_folder(tree: Path) -> None:
    """Kata's own files are opened; no other file, and nothing by a link or by `..`."""
    run, home = operations(f"f{tree / 'vc'}"), tree / "vc" / "sbs"
    assert opened(run, home / "p1" / "persist.json") == b"{}"
    assert refused(lambda: opened(run, home / "p1" / "secret")) == errno.EACCES
    assert refused(lambda: opened(run, tree / "outside" / "config.json")) == errno.EACCES
    assert refused(lambda: opened(run, home / "p1" / "config.json")) == errno.ELOOP
    assert refused(lambda: opened(run, home / "link" / "config.json")) in {
        errno.ELOOP,
        errno.ENOTDIR,
    }
    assert refused(lambda: opened(run, f"{home}/../../outside/config.json")) == errno.EINVAL
    assert refused(lambda: opened(run, home / "p1" / "pid")) == errno.EINVAL, "a FIFO"
    assert refused(lambda: opened(run, "/etc/shadow")) == errno.EACCES
    assert refused(lambda: opened(run, home / "absent" / "persist.json")) == errno.ENOENT


def test_listing_and_status(tree: Path) -> None:
    """Folders are listed, and links among their entries are not followed."""
    run, home = operations(f"f{tree / 'vc'}"), tree / "vc" / "sbs"
    assert set(run.run(b"d", os.fsencode(home), ()).data.split(b"/")) == {b"p1", b"link"}
    found = FileStatus(*STATUS.unpack(run.run(b"s", os.fsencode(home / "link"), ()).data))
    assert found.inode == (home / "link").lstat().st_ino
    assert found.modified_ns == (home / "link").lstat().st_mtime_ns
    assert refused(lambda: run.run(b"d", b"/root", ())) == errno.EACCES
    assert refused(lambda: run.run(b"s", b"/root", ())) == errno.EACCES


def test_a_folder_that_is_a_link_is_the_administrators(tree: Path) -> None:
    """An allowed folder may be named by its link and by where that leads."""
    (tree / "alias").symlink_to(tree / "vc")
    run = operations(f"f{tree / 'alias'}")
    for home in (tree / "alias", tree / "vc"):
        assert opened(run, home / "sbs" / "p1" / "persist.json") == b"{}"


def test_one_file(tree: Path) -> None:
    """A file that is allowed by name is; its neighbours are not."""
    run = operations(f"i{tree / 'outside' / 'config.json'}")
    (tree / "outside" / "state.json").write_text("secret")
    assert opened(run, tree / "outside" / "config.json") == b"secret"
    assert refused(lambda: opened(run, tree / "outside" / "state.json")) == errno.EACCES


def test_sockets(tree: Path) -> None:
    """Sockets below a folder, and those that are named, are connected to; nothing else is."""
    path, other = tree / "vc" / "qmp.sock", tree / "outside" / "nri.sock"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as second:
        server.bind(str(path))
        second.bind(str(other))
        server.listen(1)
        second.listen(1)
        run = operations(f"f{tree / 'vc'}")
        (fd,) = run.run(b"c", os.fsencode(path), ()).descriptors
        accepted, _ = server.accept()
        with accepted, socket.socket(fileno=fd) as ours:
            ours.send(b"x")
            assert accepted.recv(1) == b"x"
        assert refused(lambda: run.run(b"c", os.fsencode(other), ())) == errno.EACCES
        named = operations(f"c{other}")
        (fd,) = named.run(b"c", os.fsencode(other), ()).descriptors
        os.close(fd)
        only = operations(f"u{tree / 'outside'}")
        (fd,) = only.run(b"c", os.fsencode(other), ()).descriptors
        os.close(fd)
        assert refused(lambda: opened(only, tree / "outside" / "config.json")) == errno.EACCES
    persist = tree / "vc" / "sbs" / "p1" / "persist.json"
    assert refused(lambda: run.run(b"c", os.fsencode(persist), ())) == errno.ENOTSOCK


def test_executables(tmp_path: Path) -> None:
    """A process counts by its executable: path, file, owner and mode; by nothing it says itself."""
    allowed = tmp_path / "bin" / "qemu-system-test"
    allowed.parent.mkdir()
    shutil.copy("/bin/sleep", allowed)
    policy = Policy(f"x{tmp_path}/bin/qemu-system-*".encode())
    with running(allowed) as pid:
        assert policy.may_change(pid)
        allowed.chmod(0o777)
        assert not policy.may_change(pid), "others may write it"
        allowed.chmod(0o755)
        allowed.unlink()
        assert policy.may_change(pid), "updated while it ran"
        shutil.copy("/bin/sleep", allowed)
        assert policy.may_change(pid)
    with running(Path("/bin/sleep")) as pid:
        assert not policy.may_change(pid)
    assert not policy.may_change(os.getpid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_executable_of_another_user(tmp_path: Path) -> None:
    """A program that a user made is none, deleted or not, whatever its name."""
    own = tmp_path / "virtiofsd"
    shutil.copy("/bin/sleep", own)
    os.chown(own, 4242, 4242)
    policy = Policy(f"x{tmp_path}/*".encode())
    with running(own) as pid:
        assert not policy.may_change(pid)
        own.unlink()
        assert not policy.may_change(pid)


_HALF = """
import ctypes, subprocess, sys
assert ctypes.CDLL(None).unshare(0x20000000) == 0  # CLONE_NEWPID
half = subprocess.Popen([sys.argv[1], "60"])
print(half.pid, flush=True)
sys.stdin.read()
half.kill()
half.wait()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a pid namespace")
@pytest.mark.parametrize(
    ("parent", "name", "counts"),
    [
        ("virtiofsd-parent", "virtiofsd", True),
        ("virtiofsd-parent", "qemu-system-test", False),
        ("stranger", "virtiofsd", False),
    ],
)
def test_a_half_in_a_pid_namespace(tmp_path: Path, parent: str, name: str, counts: bool) -> None:
    """Of what is in a pid namespace only the child of the host's own file server counts."""
    shutil.copy(os.path.realpath(sys.executable), tmp_path / parent)
    shutil.copy("/bin/sleep", tmp_path / name)
    policy = Policy(f"x{tmp_path}/qemu-*".encode())
    with subprocess.Popen(
        [tmp_path / parent, "-c", _HALF, tmp_path / name],
        env={"PYTHONHOME": sys.base_prefix},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (half,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        wait_for(lambda: os.readlink(f"/proc/{half}/exe") == str(tmp_path / name), "its exec")
        assert policy.may_change(int(half)) is counts
        assert process.stdin is not None
        process.stdin.close()


def test_links_of_strangers() -> None:
    """Of any process only its executable's name is read; descriptors of sandboxes alone."""
    run = operations()
    own = os.getpid()
    assert os.fsdecode(run.run(b"l", f"/proc/{own}/exe".encode(), ()).data) == os.readlink(
        f"/proc/{own}/exe"
    )
    for path in (f"/proc/{own}/fd/0", f"/proc/{own}/cwd", "/proc/self/exe", "/etc/mtab"):
        assert refused(partial(run.run, b"l", path.encode(), ())) == errno.EACCES
    assert refused(lambda: run.run(b"d", f"/proc/{own}/fd".encode(), ())) == errno.EACCES


@pytest.mark.parametrize(
    ("letter", "data"),
    [
        (b"?", b""),
        (b"o", b""),
        (b"o", b"relative"),
        (b"o", b"/a\0b"),
        (b"r", b"\0"),
        (b"w", NUMBER.pack(1) + b"/tmp"),
        (b"k", b""),
        (b"s", b"//"),
    ],
)
def test_requests_without_sense(letter: bytes, data: bytes) -> None:
    """Each is an error of the request alone."""
    with pytest.raises((ValueError, OSError, struct.error)):
        operations().run(letter, data, ())


def test_perf_events_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon chooses the CPU alone: what is recorded, and of whom, is not its to say."""
    asked: list[tuple[object, ...]] = []

    class Recorded:
        def call(self, name: str, *arguments: object) -> int:
            asked.append((name, *arguments))
            return os.open(os.devnull, os.O_RDONLY)

    monkeypatch.setattr(perf, "libc", Recorded)
    run = operations()
    (fd,) = run.run(b"e", NUMBER.pack(3), ()).descriptors
    os.close(fd)
    ((name, _, attributes, *others),) = asked
    assert (name, others) == ("syscall", [-1, 3, -1, 8]), "any task of CPU 3, closed by execve"
    assert isinstance(attributes, bytes)
    kind, size, config, period, fields, _, bits = struct.unpack_from("=IIQQQQQ", attributes)
    assert (kind, size, config, period) == (1, 136, 0, 250_000_000), "a software clock"
    assert fields == 0x2 | 0x4 | 0x80, "thread, time and CPU: no registers, stacks or addresses"
    assert bits == 1 | 1 << 9 | 1 << 13 | 1 << 14 | 1 << 18 | 1 << 25 | 1 << 26
    for wrong in (b"", b"abc", NUMBER.pack(3) + attributes):
        with pytest.raises(struct.error):
            run.run(b"e", wrong, ())
