"""The machine is a node: systemd, cgroups, kernel, container runtimes, no open network port."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.node import Node


def test_systemd_is_init_and_all_units_are_well(node: Node) -> None:
    """Process 1 is systemd and no unit has failed."""
    assert Path("/proc/1/comm").read_text().strip() == "systemd"
    assert node.run(["systemctl", "is-system-running"]).strip() == "running"


def test_kernel_is_the_one_promised(node: Node) -> None:
    """The flavour's kernel runs: pins and vhost workers behave differently on the two."""
    assert os.uname().release.startswith(f"{node.kernel}.")


def test_cgroup_version_is_the_one_promised(node: Node) -> None:
    """Version 2 is the unified tree with cpuset; version 1 has cpuset as a tree of its own."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers")
    if node.cgroup == 2:
        assert "cpuset" in unified.read_text().split()
    else:
        assert not unified.exists()
        assert Path("/sys/fs/cgroup/cpuset/cpuset.cpus").exists()


@pytest.mark.parametrize("module", ["vhost_net", "vhost_vsock", "tun"])
def test_module_is_loaded(module: str) -> None:
    """The kernel modules that a sandbox's devices need are there, and their devices."""
    assert Path("/sys/module", module).exists()
    device = {"vhost_net": "vhost-net", "vhost_vsock": "vhost-vsock", "tun": "net/tun"}[module]
    assert Path("/dev", device).is_char_device()


@pytest.mark.parametrize(
    "argv", [["runc", "--version"], ["crun", "--version"], ["ctr", "version"]], ids=lambda a: a[0]
)
def test_runtime_answers(node: Node, argv: list[str]) -> None:
    """The OCI runtimes run, and containerd answers its client."""
    assert node.run(argv)


def test_containerd_has_nri_where_promised(node: Node) -> None:
    """containerd's NRI plugin is up and its socket is there, on Debian 13."""
    listing = node.run(["ctr", "plugins", "list"])
    states = [line.split()[-1] for line in listing.splitlines() if "nri" in line.split()[:2]]
    if node.nri:
        assert states == ["ok"]
        assert Path("/run/nri/nri.sock").is_socket()
    else:
        assert states == []


def test_nothing_listens_on_a_network(node: Node) -> None:
    """No TCP or UDP socket is open beyond loopback: the machine is closed but for the channel."""
    lines = node.run(["ss", "-H", "--listening", "--tcp", "--udp", "--numeric"]).splitlines()
    local = [line.split()[4] for line in lines]
    assert [address for address in local if not address.startswith(("127.", "[::1]"))] == []
