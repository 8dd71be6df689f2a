"""Paths of cgroups as a process in a cgroup namespace of its own reads them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kata_pin.base.errors import HostError
from kata_pin.linux import cgroup_mounts as module
from kata_pin.linux.cgroup_mounts import cgroup_mounts, host_path, read_cgroups
from kata_pin.linux.cgroups import CpusetReader, why_not_roots
from kata_pin.linux.files import HostRoot
from tests.support.hosttree import FakeHost, grow

HOSTS = "30 23 0:26 /../../.. /sys/fs/cgroup ro - cgroup2 cgroup2 rw"
OURS = "31 23 0:26 / /sys/fs/mine ro - cgroup2 cgroup2 rw"
V1 = "34 31 0:31 /../.. /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset"
SYSTEMD = "35 31 0:32 /../.. /sys/fs/cgroup/systemd ro - cgroup cgroup rw,name=systemd"
POD = "kubepods.slice/pod1.slice"


def container(folder: Path, *mounts: str, own: str = "0::/", pid: int = 77) -> HostRoot:
    """Return the root of a process in the container's cgroup, whose pid is 77."""
    host = FakeHost(folder)
    host.process(10, cgroup="0::/../../pod2.slice/vm")
    grow(
        folder,
        {
            "proc/self/mountinfo": "\n".join(mounts),
            "proc/self/cgroup": own,
            f"sys/fs/cgroup/{POD}/ours/cgroup.procs": f"5\n{pid}\n",
            f"sys/fs/cgroup/{POD}/other/cgroup.procs": "7\n777\n",
            "sys/fs/cgroup/kubepods.slice/pod2.slice/vm/cpuset.cpus.effective": "2-3",
            "sys/fs/cgroup/system.slice/a.service/b/cgroup.procs": "9\n",
            "sys/fs/cgroup/cpuset.cpus.effective": "0-7",
        },
    )
    os.remove(folder / "proc/self") if (folder / "proc/self").is_symlink() else None
    os.rename(folder / "proc/self", folder / "proc/77")
    os.symlink("77", folder / "proc/self")
    return host.root


def paths(root: HostRoot, text: str) -> list[str]:
    return [entry.path for entry in read_cgroups(root, text.encode()).entries]


def test_names_behind_the_dots(tmp_path: Path) -> None:
    """Every cgroup has the path that the host's processes read, and its cpuset is known."""
    root = container(tmp_path, HOSTS)
    assert paths(root, "0::/") == [f"/{POD}/ours"]
    assert paths(root, "0::/inner") == [f"/{POD}/ours/inner"]
    assert paths(root, "0::/../other") == [f"/{POD}/other"]
    assert paths(root, "0::/../../pod2.slice/vm") == ["/kubepods.slice/pod2.slice/vm"]
    assert paths(root, "0::/../../../init.scope") == ["/init.scope"]
    path, cpus = CpusetReader(root).of(10, 10)
    assert (path, str(cpus)) == ("/kubepods.slice/pod2.slice/vm", "2-3")


def test_both_mounts_of_a_container(tmp_path: Path) -> None:
    """The runtime's own mount shows our cgroup alone, the host's one everything."""
    root = container(tmp_path, OURS, HOSTS)
    ours, hosts = cgroup_mounts(root)
    assert (ours.root, hosts.root) == (f"/{POD}/ours", "/")
    assert ours.folder(f"/{POD}/ours/x") == f"{tmp_path}/sys/fs/mine/x"
    assert ours.folder("/init.scope") is None
    assert hosts.folder("/init.scope") == f"{tmp_path}/sys/fs/cgroup/init.scope"


def test_a_process_that_runtimes_put_deeper(tmp_path: Path) -> None:
    """Our own cgroup may lie below the namespace's root (systemd in a container does that)."""
    grow(tmp_path, {f"sys/fs/cgroup/{POD}/third/init/cgroup.procs": "78\n"})
    root = container(tmp_path, HOSTS, own="0::/init", pid=5)
    os.remove(tmp_path / "proc/self")
    os.rename(tmp_path / "proc/77", tmp_path / "proc/78")
    os.symlink("78", tmp_path / "proc/self")
    assert paths(root, "0::/../other") == [f"/{POD}/other"]
    assert paths(root, "0::/") == [f"/{POD}/third"]


def test_hierarchies_of_version_1_each(tmp_path: Path) -> None:
    """Each hierarchy has a namespace root of its own."""
    grow(
        tmp_path,
        {
            "sys/fs/cgroup/cpuset/kubepods/abc/cgroup.procs": "77\n",
            "sys/fs/cgroup/cpuset/kubepods/vm/cpuset.effective_cpus": "4",
            "sys/fs/cgroup/systemd/system.slice/crio.scope/cgroup.procs": "77\n",
        },
    )
    root = container(tmp_path, V1, SYSTEMD, own="4:cpuset:/\n1:name=systemd:/\n0::/")
    text = "4:cpuset:/../vm\n1:name=systemd:/../x\n0::/../y"
    assert paths(root, text) == ["/kubepods/vm", "/system.slice/x", "/../y"]
    cpuset = read_cgroups(root, text.encode()).cpuset
    assert cpuset is not None
    assert str(CpusetReader(root).effective(cpuset)) == "4"


@pytest.mark.parametrize(
    ("mounts", "own", "pid"),
    [
        pytest.param([OURS], "0::/", 77, id="only the runtime's mount"),
        pytest.param([HOSTS], "0::/", 78, id="our pid is listed nowhere"),
        pytest.param([HOSTS], "0::/../moved", 77, id="moved out of the namespace"),
        pytest.param([HOSTS.replace("/../../..", "/../x")], "0::/", 77, id="a neighbour's mount"),
        pytest.param(
            [HOSTS.replace("/../../..", "/../../../../../..")], "0::/", 77, id="deeper than any"
        ),
    ],
)
def test_unknown_stays_unknown(tmp_path: Path, mounts: list[str], own: str, pid: int) -> None:
    """Paths that nothing explains keep their dots, and no cpuset is invented for them."""
    root = container(tmp_path, *mounts, own=own, pid=pid)
    assert paths(root, "0::/../../pod2.slice/vm") == ["/../../pod2.slice/vm"]
    assert str(CpusetReader(root).of(10, 10)[1]) == ""


def test_above_what_is_mounted(tmp_path: Path) -> None:
    """A node that is a container itself does not see the cgroups above it."""
    assert paths(container(tmp_path, HOSTS), "0::/../../../../x") == ["/../../../../x"]


@pytest.mark.parametrize(
    ("namespace", "path", "expected"),
    [
        ("/", "/a/b", "/a/b"),
        ("/a/b", "/", "/a/b"),
        ("/a/b", "/../../x", "/x"),
        ("/a/b", "/../..", "/"),
        ("/a/b", "/../../..", None),
        ("/", "/..", None),
    ],
)
def test_paths_are_joined(namespace: str, path: str, expected: str | None) -> None:
    assert host_path(namespace, path) == expected


def test_too_many_cgroups_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FOLDERS", 2)
    assert paths(container(tmp_path, HOSTS), "0::/") == ["/"]


def test_a_passing_reason_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed for want of descriptors is looked for again."""
    root = container(tmp_path, HOSTS)

    def refuse(_path: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        with pytest.raises(HostError, match="Too many open files"):
            paths(root, "0::/")
    assert paths(root, "0::/") == [f"/{POD}/ours"]


def test_a_cgroup_that_cannot_be_seen_is_nobodys() -> None:
    """It confirms no VMM."""
    (entry,) = read_cgroups(HostRoot("/nowhere"), b"0::/../../x").entries
    assert "cannot be seen" in why_not_roots(HostRoot(), entry)
