"""What `quiet: full` writes, on this machine's own files: written, read back, and put back.

Hardware that is not here (frequency policies) is a double's in tests/unit/options/quiet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kata_pin.linux.files import HOST
from kata_pin.options.quiet.read import kernel_threads
from kata_pin.options.quiet.values import Unknown
from kata_pin.rights.broker.tunables import TUNABLE_FILES, TunableWrite, write_tunables

pytestmark = pytest.mark.root


@contextmanager
def _written(kind: str, name: str, value: str) -> Iterator[str]:
    """Write a value, yield what is there then, and put the first one back."""
    path = Path(TUNABLE_FILES[kind].path.format(*name.split("/")))
    first = path.read_text().strip()
    try:
        (done,) = write_tunables([TunableWrite(kind, name, value)])
        assert done.errno == 0, os.strerror(done.errno)
        yield done.value
    finally:
        write_tunables([TunableWrite(kind, name, first)])
    assert path.read_text().strip() == first


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("workqueues", "", "1"),
        ("idle-limit", "0", "150"),
        ("rps", "lo/rx-0", "1"),
        ("watchdog", "", "0"),
    ],
)
def test_a_file(kind: str, name: str, value: str) -> None:
    """The kernel takes the value and has it until it is put back."""
    path = Path(TUNABLE_FILES[kind].path.format(*name.split("/")))
    if not os.access(path, os.W_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
        pytest.skip(f"{path} is missing or read-only here")
    with _written(kind, name, value) as found:
        assert int(found, 16 if kind in {"workqueues", "rps"} else 10) == int(value)


def test_a_kernel_thread() -> None:
    """One that can be moved is moved, and moved back."""
    threads = kernel_threads(HOST)
    if isinstance(threads, Unknown):
        pytest.skip("no kernel threads are visible here")
    for one in threads:
        if len(one.affinity) < 2:
            continue
        name = f"{one.tid}:{one.starttime}"
        target = str(one.affinity.first)
        (moved,) = write_tunables([TunableWrite("kernel-thread", name, target)])
        (back,) = write_tunables([TunableWrite("kernel-thread", name, str(one.affinity))])
        if moved.errno:
            continue  # it ended, or the kernel keeps it
        assert moved.value == target
        assert (back.errno, back.value) == (0, str(one.affinity))
        return
    pytest.skip("no kernel thread can be moved here")
