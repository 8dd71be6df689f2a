"""`doctor` on VM sizes: what a configuration gives pods with exclusive CPUs, and what mends it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config, Paths
from kata_pin.base.documents.document import Nri
from kata_pin.base.documents.state import Row, State
from kata_pin.cli.doctor import sandboxes
from kata_pin.cli.node import containerd
from tests.unit.cli import documents as docs

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


@pytest.fixture(autouse=True)
def no_containerd(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's containerd is not asked; the node has 16 CPUs."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)


def row(folder: Path, text: str, state: State | None = None) -> Row:
    """Return the row of a configuration."""
    (folder / "configuration.toml").write_text(text)
    config = Config(paths=Paths(kata_configs=(str(folder),)))
    (found,) = sandboxes.rows(config, state)
    return found


def static_kubelet() -> State:
    """Return the state of a node whose kubelet gives exclusive CPUs."""
    state = docs.state(docs.database())
    assert state.node.kubelet is not None
    assert state.node.kubelet.policy == "static"
    return state


def test_kata_4_as_it_is_shipped(tmp_path: Path) -> None:
    """One vCPU for any number of exclusive CPUs, and the drop-in for 8 of them."""
    text = RUST.format(overhead="overhead_vcpus = 0.2", static="true")
    found = row(tmp_path, text, static_kubelet())
    assert found.status == "warn"
    assert found.text == (
        f"{tmp_path}/configuration.toml (runtime-rs, qemu, static sizing): pods with 1, 2, 4, 8 "
        "exclusive CPUs get VMs of 1, 1, 1, 1 vCPUs, or of 2, 3, 5, 9 if they keep a CPU quota"
    )
    assert "kata-pin kata-class --cpus 8" in found.remedy
    assert "(config.d/90-kata-pin.toml: [hypervisor.qemu] overhead_vcpus = 8.2)" in found.remedy
    assert "DisableCPUQuotaWithExclusiveCPUs: false" in found.remedy
    assert row(tmp_path, text).status == "info"  # nobody gives exclusive CPUs here


def test_the_drop_in_mends_it(tmp_path: Path) -> None:
    """With what the remedy says, the same node is in order."""
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d" / "90-kata-pin.toml").write_text(
        "[hypervisor.qemu]\noverhead_vcpus = 8.2\n"
    )
    text = RUST.format(overhead="overhead_vcpus = 0.2", static="true")
    found = row(tmp_path, text, static_kubelet())
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
def test_sizes_of_each_way(tmp_path: Path, text: str, sizes: str) -> None:
    """The runtime is told from its file; before 4.0 runtime-rs had no overhead_vcpus."""
    assert sizes in row(tmp_path, text).text


def test_the_version_beside_the_release(tmp_path: Path) -> None:
    """An old Go runtime counts no shares: its own remedy, with the value to write."""
    folder = tmp_path / "share" / "defaults"
    folder.mkdir(parents=True)
    (tmp_path / "VERSION").write_text("3.21.0\n")
    found = row(folder, GO.format(more="static_sandbox_resource_mgmt = true"), static_kubelet())
    assert "get VMs of 1, 1, 1, 1 vCPUs" in found.text
    assert "(config.d/90-kata-pin.toml: [hypervisor.qemu] default_vcpus = 9)" in found.remedy


@pytest.mark.parametrize("overhead", [0.2, 8.2])
def test_a_template_has_the_size_of_its_file(tmp_path: Path, overhead: float) -> None:
    """A class by size does not reach VMs of a template; runtime-rs alone has this."""
    template = "[hypervisor.qemu.factory]\nenable_template = true\n"
    text = RUST.format(overhead=f"overhead_vcpus = {overhead}", static="true") + template
    found = row(tmp_path, text, static_kubelet())
    assert found.status == "warn"
    assert found.text.endswith(
        "(runtime-rs, qemu, VM template): pods with 1, 2, 4, 8 exclusive CPUs get VMs of 1, 1, 1, 1"
        " vCPUs"
    )
    assert found.remedy.startswith("set enable_template = false under [hypervisor.qemu.factory]")
    assert "kata-pin kata-class" not in found.remedy
    go = GO.format(more="static_sandbox_resource_mgmt = true") + template
    assert "go, qemu, static sizing" in row(tmp_path, go).text


def test_updates_that_kata_fails(tmp_path: Path) -> None:
    """More boot vCPUs than the cpuset's size: told whatever the kubelet does."""
    text = RUST.format(overhead="overhead_vcpus = 0.2", static="false")
    found = row(tmp_path, text.replace("default_vcpus = 1", "default_vcpus = 4"))
    assert found.status == "warn"
    assert "Kata fails updates of pods with 1, 2 (VM larger than their cpuset)" in found.text


def test_crio_tells_no_sizes(tmp_path: Path) -> None:
    """Beside CRI-O static sizing knows default_vcpus only; no remedy was tried there."""
    state = static_kubelet()
    nri = Nri("/var/run/nri/nri.sock", "cri-o 1.34.1", 1.0, "")
    state = replace(state, daemon=replace(state.daemon, nri=nri))
    found = row(tmp_path, RUST.format(overhead="overhead_vcpus = 0.2", static="true"), state)
    assert found.text.endswith("get VMs of 1, 1, 1, 1 vCPUs")
    assert found.remedy == ""


def test_handlers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several configurations, those that handlers of containerd use are told, by handler."""
    (tmp_path / "configuration-clh.toml").write_text('[hypervisor.clh]\npath = "/c"\n')
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/containerd")
    dump = DUMP.format(path=tmp_path / "configuration.toml")
    monkeypatch.setattr(containerd, "run_program", lambda _: dump)
    found = row(tmp_path, GO.format(more=""))
    assert found.text.startswith("kata (go, qemu, dynamic sizing): ")
