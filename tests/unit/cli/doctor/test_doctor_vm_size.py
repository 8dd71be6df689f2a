"""`doctor` on VM sizes: what a configuration gives pods with exclusive CPUs, and what mends it."""

from __future__ import annotations

import os
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.cli import documents as docs
from tests.unit.conftest import Doctor

pytestmark = pytest.mark.root

RUST = """
[hypervisor.qemu]
path = "/opt/kata/bin/qemu-system-x86_64"
default_vcpus = 1
{overhead}
[runtime]
hypervisor_name = "qemu"
static_sandbox_resource_mgmt = {static}
"""
GO = '[hypervisor.qemu]\npath = "/opt/kata/bin/qemu"\ndefault_vcpus = 1\n[runtime]\n{more}\n'

DUMP = """
version = 3
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.kata]
runtime_type = "io.containerd.kata.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.kata.options]
ConfigPath = "{path}"
"""


NO_KUBELET = replace(docs.state(), node=replace(docs.state().node, kubelet=None))
STATIC = docs.state()
"""A node whose kubelet gives exclusive CPUs."""


class Sizes:
    """`doctor` of a node with 16 CPUs and one configuration of Kata."""

    def __init__(self, doctor: Doctor) -> None:
        self.doctor = doctor
        self.folder = doctor.folder / "share" / "defaults"
        self.folder.mkdir(parents=True)
        self.program = doctor.folder / "bin" / "containerd"
        self.program.parent.mkdir()

    def row(self, text: str, state: Any = NO_KUBELET) -> Any:
        """Return the row of a configuration."""
        (self.folder / "configuration.toml").write_text(text)
        self.doctor.state = state
        return self.doctor.row("VM size", paths={"kata_configs": [str(self.folder)]})


@pytest.fixture
def node(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """A node without containerd."""
    one = Sizes(doctor)
    monkeypatch.setenv("PATH", str(one.program.parent))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    return one


def test_kata_4_as_it_is_shipped(node: Sizes) -> None:
    """One vCPU for any number of exclusive CPUs, and the drop-in for 8 of them."""
    text = RUST.format(overhead="overhead_vcpus = 0.2", static="true")
    found = node.row(text, STATIC)
    assert found.status == "warn"
    assert found.text == (
        f"{node.folder}/configuration.toml (runtime-rs, qemu, static sizing): pods with 1, 2, 4, 8 "
        "exclusive CPUs get VMs of 1, 1, 1, 1 vCPUs, or of 2, 3, 5, 9 if they keep a CPU quota"
    )
    assert "kata-pin kata-class --cpus 8" in found.remedy
    assert "(config.d/90-kata-pin.toml: [hypervisor.qemu] overhead_vcpus = 8.2)" in found.remedy
    assert "DisableCPUQuotaWithExclusiveCPUs: false" in found.remedy
    assert node.row(text).status == "info"  # nobody gives exclusive CPUs here


def test_the_drop_in_mends_it(node: Sizes) -> None:
    """With what the remedy says, the same node is in order."""
    (node.folder / "config.d").mkdir()
    (node.folder / "config.d" / "90-kata-pin.toml").write_text(
        "[hypervisor.qemu]\noverhead_vcpus = 8.2\n"
    )
    text = RUST.format(overhead="overhead_vcpus = 0.2", static="true")
    found = node.row(text, STATIC)
    assert (found.status, found.remedy) == ("ok", "")
    assert "get VMs of 9, 9, 9, 9 vCPUs" in found.text


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (GO.format(more=""), "dynamic sizing): pods with 1, 2, 4, 8 exclusive CPUs get VMs of 2, "),
        (GO.format(more="static_sandbox_resource_mgmt = true"), "get VMs of 2, 3, 5, 9 vCPUs"),
        (RUST.format(overhead="overhead_vcpus = 0.2", static="false"), "of 1, 2, 4, 8 vCPUs, or"),
        (RUST.format(overhead="", static="true"), "of 1, 1, 1, 1 vCPUs, or of 2, 3, 5, 9 if"),
    ],
)
def test_sizes_of_each_way(node: Sizes, text: str, sizes: str) -> None:
    """The runtime is told from its file; before 4.0 runtime-rs had no overhead_vcpus."""
    assert sizes in node.row(text).text


def test_the_version_beside_the_release(node: Sizes) -> None:
    """An old Go runtime counts no shares: its own remedy, with the value to write."""
    (node.doctor.folder / "VERSION").write_text("3.21.0\n")
    found = node.row(GO.format(more="static_sandbox_resource_mgmt = true"), STATIC)
    assert "get VMs of 1, 1, 1, 1 vCPUs" in found.text
    assert "(config.d/90-kata-pin.toml: [hypervisor.qemu] default_vcpus = 9)" in found.remedy


@pytest.mark.parametrize("overhead", [0.2, 8.2])
def test_a_template_has_the_size_of_its_file(node: Sizes, overhead: float) -> None:
    """A class by size does not reach VMs of a template; runtime-rs alone has this."""
    template = "[hypervisor.qemu.factory]\nenable_template = true\n"
    text = RUST.format(overhead=f"overhead_vcpus = {overhead}", static="true") + template
    found = node.row(text, STATIC)
    assert found.status == "warn"
    assert found.text.endswith(
        "(runtime-rs, qemu, VM template): pods with 1, 2, 4, 8 exclusive CPUs get VMs of 1, 1, 1, 1"
        " vCPUs"
    )
    assert found.remedy.startswith("set enable_template = false under [hypervisor.qemu.factory]")
    assert "kata-pin kata-class" not in found.remedy
    go = GO.format(more="static_sandbox_resource_mgmt = true") + template
    assert "go, qemu, static sizing" in node.row(go).text


def test_updates_that_kata_fails(node: Sizes) -> None:
    """More boot vCPUs than the cpuset's size: told whatever the kubelet does."""
    text = RUST.format(overhead="overhead_vcpus = 0.2", static="false")
    found = node.row(text.replace("default_vcpus = 1", "default_vcpus = 4"))
    assert found.status == "warn"
    assert "Kata fails updates of pods with 1, 2 (VM larger than their cpuset)" in found.text


def test_crio_tells_no_sizes(node: Sizes) -> None:
    """Beside CRI-O static sizing knows default_vcpus only; no remedy was tried there."""
    nri = replace(docs.NRI, runtime="cri-o 1.34.1")
    state = replace(STATIC, daemon=replace(docs.RUNNING, nri=nri))
    found = node.row(RUST.format(overhead="overhead_vcpus = 0.2", static="true"), state)
    assert found.text.endswith("get VMs of 1, 1, 1, 1 vCPUs")
    assert found.remedy == ""


def test_handlers_are_named(node: Sizes) -> None:
    """Of several configurations, those that handlers of containerd use are told, by handler."""
    (node.folder / "configuration-clh.toml").write_text('[hypervisor.clh]\npath = "/c"\n')
    dump = DUMP.format(path=node.folder / "configuration.toml")
    node.program.write_text(f"#!/bin/sh\n/bin/cat <<END\n{dump}END\n")
    node.program.chmod(0o755)
    assert node.row(GO.format(more="")).text.startswith("kata (go, qemu, dynamic sizing): ")
