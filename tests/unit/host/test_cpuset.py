"""Effective cpusets on cgroup v1, v2 and both."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.errors import TaskGone
from kata_pin.host.cpuset import CpusetReader
from tests.support.hosttree import FakeHost, grow

V1 = "34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset"
V2 = "38 31 0:38 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw"
PURE = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
CPU_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"


def cpuset_of(
    folder: Path, mounts: list[str], cgroup: str, files: dict[str, str]
) -> tuple[str, str]:
    host = FakeHost(folder)
    host.process(10, cgroup=cgroup)
    grow(folder, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    grow(
        folder,
        {"proc/self/mountinfo": "\n".join(["22 27 0:21 / /proc rw - proc proc rw", *mounts])},
    )
    path, cpus = CpusetReader(host.root).of(10, 10)
    return path, str(cpus)


@pytest.mark.parametrize(
    ("mounts", "cgroup", "files", "expected"),
    [
        pytest.param(
            [V1], "3:cpuset:/a", {"cpuset/a/cpuset.effective_cpus": "1"}, ("/a", "1"), id="v1"
        ),
        pytest.param(
            [V1], "3:cpuset:/a", {"cpuset/a/cpuset.cpus": "2"}, ("/a", "2"), id="v1 before 3.17"
        ),
        pytest.param(
            [CPU_V1, V1, V2],
            "3:cpuset:/a\n1:cpu:/b\n0::/c",
            {"cpuset/a/cpuset.effective_cpus": "1", "unified/c/cpuset.cpus.effective": "3"},
            ("/a", "1"),
            id="hybrid follows v1",
        ),
        pytest.param(
            [CPU_V1, V2],
            "1:cpu:/b\n0::/c",
            {"unified/c/cpuset.cpus.effective": "3"},
            ("/c", "3"),
            id="hybrid with the controller on v2",
        ),
        pytest.param(
            [PURE], "0::/a/b", {"a/b/cpuset.cpus.effective": "0-1"}, ("/a/b", "0-1"), id="v2"
        ),
        pytest.param(
            [PURE],
            "0::/a/b/c",
            {"a/cpuset.cpus.effective": "0-1", "cpuset.cpus.effective": "0-3", "a/b/c/x": ""},
            ("/a/b/c", "0-1"),
            id="v2 nearest ancestor",
        ),
        pytest.param([PURE], "0::/a", {"cpuset.cpus.effective": "0-3"}, ("/a", "0-3"), id="v2 top"),
        pytest.param([PURE], "0::/a", {}, ("/a", ""), id="v2 without the controller"),
        pytest.param(
            [PURE],
            "0::/../a",
            {"a/cpuset.cpus.effective": "0-1", "cpuset.cpus.effective": "0-3"},
            ("/../a", ""),
            id="outside of our cgroup namespace",
        ),
        pytest.param(
            [PURE],
            "0::/a (deleted)",
            {"cpuset.cpus.effective": "0-3"},
            ("/a", ""),
            id="removed cgroup",
        ),
        pytest.param(
            ["38 31 0:38 /pods /sys/fs/cgroup rw - cgroup2 cgroup2 rw"],
            "0::/pods/a",
            {"a/cpuset.cpus.effective": "2"},
            ("/pods/a", "2"),
            id="mount that shows a subtree",
        ),
        pytest.param(
            ["38 31 0:38 /pods /sys/fs/cgroup rw - cgroup2 cgroup2 rw"],
            "0::/podsx/a",
            {"x/a/cpuset.cpus.effective": "2", "cpuset.cpus.effective": "3"},
            ("/podsx/a", ""),
            id="beside the mounted subtree",
        ),
        pytest.param(
            [r"38 31 0:38 / /sys/fs/cgroup/a\040b rw - cgroup2 cgroup2 rw"],
            "0::/x y",
            {"a b/x y/cpuset.cpus.effective": "1"},
            ("/x y", "1"),
            id="spaces",
        ),
        pytest.param(
            [PURE], "0::/a", {"a/cpuset.cpus.effective": "0-x"}, ("/a", ""), id="garbage is unknown"
        ),
        pytest.param([], "3:cpuset:/a", {}, ("/a", ""), id="nothing mounted"),
        pytest.param([PURE, "short line", " - cgroup2"], "1:cpu:/", {}, ("", ""), id="no cpuset"),
    ],
)
def test_effective_cpuset(
    tmp_path: Path,
    mounts: list[str],
    cgroup: str,
    files: dict[str, str],
    expected: tuple[str, str],
) -> None:
    """The thread's cgroup and its effective CPUs, empty where nobody can know."""
    assert cpuset_of(tmp_path, mounts, cgroup, files) == expected


def test_one_look_per_cgroup_and_pass(tmp_path: Path) -> None:
    """A reader judges a whole pass by its first look; the next reader sees the change."""
    host = FakeHost(tmp_path)
    host.process(10, threads=2, cgroup="0::/a")
    grow(tmp_path, {"proc/self/mountinfo": PURE, "sys/fs/cgroup/a/cpuset.cpus.effective": "0-1"})
    reader = CpusetReader(host.root)
    first = reader.of(10, 10)
    grow(tmp_path, {"sys/fs/cgroup/a/cpuset.cpus.effective": "2"})
    assert reader.of(10, 11) == first
    assert str(CpusetReader(host.root).of(10, 10)[1]) == "2"


def test_gone_thread(tmp_path: Path) -> None:
    """A thread that exited raises, and is no thread without limits."""
    host = FakeHost(tmp_path)
    with pytest.raises(TaskGone):
        CpusetReader(host.root).of(10, 10)
