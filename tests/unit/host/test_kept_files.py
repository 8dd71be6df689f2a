"""Descriptors that stay open: what is read is what is there now."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kata_pin.host import kept_files
from kata_pin.host.kept_files import KeptFiles


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


def test_descriptors_have_a_limit(
    files: KeptFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it files are opened for each read; those that are not needed are closed."""
    monkeypatch.setattr(kept_files, "MOST", 2)
    before = len(os.listdir("/proc/self/fd"))
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name)
        assert files.read(str(path)) == path.name.encode()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    files.keep_only({str(paths[1])})
    assert len(os.listdir("/proc/self/fd")) == before + 1
