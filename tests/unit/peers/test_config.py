"""Kata's configuration.toml."""

from __future__ import annotations

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.peers.kata import KataConfig, parse_kata_config

GO = """
# comment
[hypervisor.qemu]
path = "/opt/kata/bin/qemu-system-x86_64"
valid_hypervisor_paths = ["/opt/kata/bin/qemu-system-x86_64", "/usr/bin/qemu*"]
enable_debug = true
extra_monitor_socket = "qmp"
enable_iothreads = true
default_vcpus = 1.5
default_maxvcpus = 16
[agent.kata]
[runtime]
enable_vcpus_pinning = true
sandbox_cgroup_only = true
static_sandbox_resource_mgmt = true
"""


def test_go() -> None:
    """Every setting that matters is read."""
    (config,) = parse_kata_config(GO)
    assert config == KataConfig(
        hypervisor="qemu",
        path="/opt/kata/bin/qemu-system-x86_64",
        valid_paths=("/opt/kata/bin/qemu-system-x86_64", "/usr/bin/qemu*"),
        debug=True,
        extra_monitor="qmp",
        iothreads=True,
        default_vcpus=1.5,
        default_maxvcpus=16,
        vcpu_pinning=True,
        sandbox_cgroup_only=True,
        static_sizing=True,
    )
    assert config.binaries == ("/opt/kata/bin/qemu-system-x86_64", "/usr/bin/qemu*")


def test_drop_ins() -> None:
    """A drop-in replaces single keys, the last one counts, and tables stay."""
    (config,) = parse_kata_config(
        GO,
        [
            "[runtime]\nsandbox_cgroup_only = false\n[hypervisor.qemu]\ndefault_vcpus = 2",
            "[hypervisor.qemu]\ndefault_vcpus = -1\nvalid_hypervisor_paths = []",
        ],
    )
    assert (config.sandbox_cgroup_only, config.vcpu_pinning) == (False, True)
    assert (config.default_vcpus, config.valid_paths, config.debug) == (-1, (), True)


def test_runtime_rs_picks_its_hypervisor() -> None:
    """With several tables, the chosen one comes first."""
    text = '[hypervisor.a]\n[hypervisor.qemu]\npath="/q"\n[runtime]\nhypervisor_name="qemu"\n'
    assert [config.hypervisor for config in parse_kata_config(text)] == ["qemu", "a"]


def test_nothing() -> None:
    """A file without hypervisors configures none."""
    assert parse_kata_config("") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not TOML"),
        ("a = 1\na = 2", "not TOML"),
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a = " + "9" * 5000, "not TOML"),
        ("#" * 300_000, "longer than"),
        ("hypervisor = 1", "hypervisor: not an object"),
        ("[hypervisor.q]\npath = 1", "hypervisor.q.path: not a text"),
        ("[hypervisor.q]\nvalid_hypervisor_paths = [1]", "valid_hypervisor_paths: not a list of"),
        ("[hypervisor.q]\nenable_debug = 1", "enable_debug: not true or false"),
        ('[hypervisor.q]\ndefault_vcpus = "1"', "default_vcpus: not a number"),
        ("[hypervisor.q]\ndefault_vcpus = true", "default_vcpus: not a number"),
        ("[hypervisor.q]\ndefault_vcpus = nan", "default_vcpus: not within"),
        ("[hypervisor.q]\ndefault_vcpus = inf", "default_vcpus: not within"),
    ],
)
def test_wrong(text: str, message: str) -> None:
    """What is wrong is named with its key."""
    with pytest.raises(ParseError, match=rf"^configuration.toml: .*{message}"):
        parse_kata_config(text)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", False),
        ('hot_plug_vfio = "no-port"', False),
        ('hot_plug_vfio = "root-port"', True),
        ('cold_plug_vfio = "root-port"', False),
    ],
)
def test_a_port_for_vfio_devices(line: str, expected: bool) -> None:
    """A VM that runs gets devices by hot plug only; Kata's default names no port."""
    (config,) = parse_kata_config(f"[hypervisor.qemu]\n{line}\n")
    assert config.hot_plug_vfio is expected
