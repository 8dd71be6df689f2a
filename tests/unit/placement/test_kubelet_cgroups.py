"""Names of pods' cgroups as the real kubelet makes them, with both cgroup drivers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kata_pin.linux.proc import parse_cgroup
from kata_pin.placement.exclusive import pooled
from kata_pin.placement.owners import place_of

DOCUMENT = json.loads((Path(__file__).parents[2] / "data/kubelet/cgroup_names.json").read_text())
UID = DOCUMENT["uid"]
ID = "9c1f" * 16


@pytest.mark.parametrize(("qos", "cgroupfs", "systemd"), DOCUMENT["rows"])
def test_the_cgroups_path_says_the_class(qos: str, cgroupfs: str, systemd: str) -> None:
    """What containerd and CRI-O make of the name: a folder, or `slice:prefix:id`."""
    for path in (
        f"{cgroupfs}/{ID}",
        f"{systemd.rpartition('/')[2]}:cri-containerd:{ID}",
        f"{systemd.rpartition('/')[2]}:crio:{ID}",
    ):
        assert pooled(path) == bool(qos)


@pytest.mark.parametrize(("_qos", "cgroupfs", "systemd"), DOCUMENT["rows"])
@pytest.mark.parametrize("line", ["0::{}", "6:cpuset:{}\n1:name=systemd:{}\n0::/"])
def test_where_a_vm_is(_qos: str, cgroupfs: str, systemd: str, line: str) -> None:
    """The sandbox and its pod are read from each place, in cgroup v1 and v2.

    Last, what Kata makes of a slice's name if its own cgroups are those of cgroupfs.
    """
    for path in (
        f"{cgroupfs}/kata_{ID}",
        f"{cgroupfs}/{ID}",
        f"{systemd}/cri-containerd-{ID}.scope",
        f"{systemd}/crio-{ID}.scope",
        f"/{systemd.rpartition('/')[2]}:cri-containerd:{ID}",
    ):
        groups = parse_cgroup(line.format(path, path).encode())
        assert groups.names(ID)
        assert not groups.names(ID[:-1])
        assert groups.cpuset is not None
        assert groups.cpuset.path == path
        assert place_of(path).pod_uid == UID
