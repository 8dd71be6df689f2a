"""Descriptors that stay open: what is read is what is there now."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import closing
from errno import EMFILE
from pathlib import Path

import pytest

from kata_pin.linux import interrupts
from kata_pin.linux.interrupts import KeptFiles


@pytest.fixture
def files() -> Iterator[KeptFiles]:
    """Files that are closed in the end."""
    with closing(KeptFiles()) as found:
        yield found


def test_the_kernel_makes_the_content_each_time(files: KeptFiles) -> None:
    """A file of /proc that changes between two reads, with one descriptor."""
    Path("/proc/self/comm").read_bytes()
    before = files.read("/proc/self/schedstat")
    opened = len(os.listdir("/proc/self/fd"))
    time.sleep(0.001)  # a switch brings the count up to date; running alone waits for a tick
    assert files.read("/proc/self/schedstat") != before
    assert len(os.listdir("/proc/self/fd")) == opened


def test_what_is_gone(files: KeptFiles) -> None:
    """The file of a thread that ended gives an error, and another one is opened in its place."""
    pid = os.fork()
    if not pid:
        os.read(os.pipe()[0], 1)
        os._exit(0)
    path = f"/proc/{pid}/stat"
    assert files.read(path)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    with pytest.raises(FileNotFoundError):
        files.read(path)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Three files, each with its name."""
    for name in "abc":
        (tmp_path / name).write_text(name)
    return [str(tmp_path / name) for name in "abc"]


def test_descriptors_have_a_limit(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it files are opened for each read; those that are not needed are closed."""
    monkeypatch.setattr(interrupts, "MOST", 2)
    before = len(os.listdir("/proc/self/fd"))
    with closing(KeptFiles()) as files:
        assert [files.read(path) for path in paths] == [b"a", b"b", b"c"]
        assert len(os.listdir("/proc/self/fd")) == before + 2
        files.keep_only({paths[1]})
        assert len(os.listdir("/proc/self/fd")) == before + 1


@pytest.mark.parametrize(("soft", "kept"), [(8, 2), (1 << 16, 3), (resource.RLIM_INFINITY, 3)])
def test_others_need_descriptors_too(
    paths: list[str], monkeypatch: pytest.MonkeyPatch, soft: int, kept: int
) -> None:
    """A quarter of the process's are kept at most."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    monkeypatch.setattr(interrupts, "MOST", 3)
    before = len(os.listdir("/proc/self/fd"))
    with closing(KeptFiles()) as files:
        for path in (*paths, "/proc/self/stat"):
            files.read(path)
        assert len(os.listdir("/proc/self/fd")) == before + kept


def test_what_is_new_beyond_the_limit(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is opened for each read is new once, and again after it was gone."""
    monkeypatch.setattr(interrupts, "MOST", 1)
    with closing(KeptFiles()) as files:
        for path in paths:
            files.read(path)
        assert files.opened == {*paths}
        files.opened.clear()
        for path in paths:
            files.read(path)
        assert not files.opened
        Path(paths[1]).unlink()
        with pytest.raises(FileNotFoundError):
            files.read(paths[1])
        Path(paths[1]).write_text("b")
        files.read(paths[1])
        assert files.opened == {paths[1]}
        files.opened.clear()
        files.keep_only({paths[2]})
        files.read(paths[2])
        assert not files.opened, "it is kept now, and the same as before"
        files.read(paths[1])
        assert files.opened == {paths[1]}


def test_no_descriptor_is_left(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That says nothing of the file."""
    monkeypatch.setattr(interrupts, "MOST", 0)
    with closing(KeptFiles()) as files:
        files.read(paths[0])
        files.opened.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", _none_left)
            with pytest.raises(OSError, match="Too many open files"):
                files.read(paths[0])
        files.read(paths[0])
        assert not files.opened


def _none_left(path: str, flags: int) -> int:
    raise OSError(EMFILE, os.strerror(EMFILE), path)
