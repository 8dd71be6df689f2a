"""Command lines of the VMMs beside QEMU, of shims and of file servers."""

from __future__ import annotations

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.peers import vmm_cmdline
from kata_pin.peers.vmm_cmdline import VmmCommand


def test_cloud_hypervisor() -> None:
    """The socket's folder names the sandbox, in the Go layout and in runtime-rs'."""
    go = ["/opt/kata/bin/cloud-hypervisor", "--api-socket", "/run/vc/vm/s1/clh-api.sock"]
    assert vmm_cmdline.parse_cloud_hypervisor(go) == VmmCommand("s1")
    rs = ["cloud-hypervisor", "--api-socket=path=/run/kata/s1/root/ch-api.sock,x=y"]
    assert vmm_cmdline.parse_cloud_hypervisor(rs).sandbox_id == "s1"
    assert vmm_cmdline.parse_cloud_hypervisor(["cloud-hypervisor"]) == VmmCommand()
    assert vmm_cmdline.parse_cloud_hypervisor(["x", "--api-socket", "a," * 9999]) == VmmCommand()


def test_firecracker() -> None:
    """--id names the sandbox, else the socket's folder does, in the layouts of both runtimes."""
    assert vmm_cmdline.parse_firecracker(["firecracker", "--id", "s1"]).sandbox_id == "s1"
    for path in ("/run/vc/firecracker/s1/root/run/firecracker.socket", "/run/kata/s1/run/fc.sock"):
        assert vmm_cmdline.parse_firecracker(["fc", "--api-sock", path]).sandbox_id == "s1"
    times = ["--start-time-us", "1", "--start-time-cpu-us", "0", "--parent-cpu-time-us", "7"]
    go = ["/firecracker", "--id", "s1", *times, "--config-file", "/fcConfig.json"]
    rs = ["/firecracker", "--id", "s1", *times, "--api-sock", "/run//fc.sock"]
    for jailed in (go, rs):
        assert vmm_cmdline.parse_firecracker(jailed).sandbox_id == "s1"
    assert vmm_cmdline.parse_firecracker(["fc", "--id", "../x"]).sandbox_id == ""


def test_firecracker_ids_are_cut() -> None:
    """Kata gives firecracker the first 32 characters of an id; another VMM's are whole."""
    command = vmm_cmdline.parse_firecracker(["fc", "--id", "0" * 32])
    assert command.names("0" * 64)
    assert command.names("0" * 32)
    assert not command.names("0" * 31 + "1" * 33)
    assert not VmmCommand("0" * 32).names("0" * 64)


def test_shim() -> None:
    """The shim's -id is its sandbox, in the forms that Go's flags take."""
    recorded = ["/opt/kata/bin/containerd-shim-kata-v2", "-namespace", "default", "-id", "p1", ""]
    assert vmm_cmdline.parse_shim(recorded).sandbox_id == "p1"
    assert vmm_cmdline.parse_shim(["shim", "--id=p1"]).sandbox_id == "p1"
    assert vmm_cmdline.parse_shim(["shim", "-id"]).sandbox_id == ""
    with pytest.raises(ParseError, match="arguments"):
        vmm_cmdline.parse_shim(["x"] * 20_000)


@pytest.mark.parametrize(
    ("argument", "yes"),
    [
        ("--shared-dir=/run/kata-containers/shared/sandboxes/p1/shared", True),
        ("/run/kata/p1/root/virtiofsd.sock", True),
        ("--socket-path=p1", True),
        ("--shared-dir=/run/kata-containers/shared/sandboxes/p10/shared", False),
        ("--fd=3", False),
    ],
)
def test_names_sandbox(argument: str, *, yes: bool) -> None:
    """virtiofsd names its sandbox by a whole element of a path."""
    assert vmm_cmdline.names_sandbox(["virtiofsd", "--syslog", argument], "p1") is yes


def test_the_empty_id_is_named_by_nobody() -> None:
    """No process belongs to a sandbox without an id."""
    assert not vmm_cmdline.names_sandbox(["a", ""], "")
