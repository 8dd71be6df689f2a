"""`kata-class`: the files of a class by size, as containerd and Kata read them.

Beside a real containerd: tests/integration/test_install_containerd.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.errors import KataPinError
from kata_pin.cli.doctor.sandboxes import sizing_of
from kata_pin.cli.node.changes import MANIFEST, NodeFiles
from kata_pin.cli.node.files import CLASSES, NodeFile
from kata_pin.cli.node.kata_class import plan
from kata_pin.peers.kata import read_kata_config
from kata_pin.placement.vm_size import exclusive_pod, vm_size

pytestmark = pytest.mark.root

PLUGIN = "io.containerd.cri.v1.runtime"
CONFIG = """
[hypervisor.qemu]
path = "/opt/kata/bin/qemu-system-x86_64"
default_vcpus = 1
overhead_vcpus = 0.2
[runtime]
hypervisor_name = "qemu"
static_sandbox_resource_mgmt = true
"""
TABLE = """
version = 3
[plugins."{plugin}"]
image = "{image}"
[plugins."{plugin}".containerd.runtimes.kata]
runtime_type = "io.containerd.kata.v2"
privileged_without_host_devices = true
pod_annotations = ["io.katacontainers.*"]
base_runtime_spec = "/etc/kata-pin/containerd/kata.json"
[plugins."{plugin}".containerd.runtimes.kata.options]
ConfigPath = "{config}"
TypeUrl = "runtimeoptions.v1.Options"
"""

Run = Callable[[Sequence[str]], str]


def fake(config: str, *, merges: bool = True) -> Run:
    """Return a containerd that unites its file with the drop-in of a trial, or replaces tables."""

    def run(command: Sequence[str]) -> str:
        added = Path(command[2]).with_name("kata-pin.toml") if "--config" in command else None
        text = TABLE.format(plugin=PLUGIN, image="pause:1", config=config)
        if added is None or not added.exists():
            return text
        if not merges:
            text = text.replace("pause:1", "default")
        return text + "".join(added.read_text().partition("\n[")[1:])

    return run


@pytest.fixture
def kata(tmp_path: Path) -> Path:
    """Return a configuration of Kata with a drop-in."""
    folder = tmp_path / "kata"
    (folder / "config.d").mkdir(parents=True)
    (folder / "config.d" / "50-user").write_text("[hypervisor.qemu]\nenable_debug = true\n")
    file = folder / "configuration.toml"
    file.write_text(CONFIG)
    return file


def handler_in(file: NodeFile, name: str) -> Any:
    """Return the table of a handler in a drop-in of containerd."""
    document = tomllib.loads(file.content.decode())
    return document["plugins"][PLUGIN]["containerd"]["runtimes"][name]


def test_the_files_of_a_class(kata: Path) -> None:
    """A copy of Kata's file and drop-ins with one more, and the handler with another ConfigPath."""
    made = plan(4, "kata", fake(str(kata)))
    assert made.name == "kata-cpus-4"
    folder = f"{CLASSES}kata-cpus-4"
    assert [file.path for file in made.files] == [
        f"{folder}/configuration.toml",
        f"{folder}/config.d/50-user",
        f"{folder}/config.d/90-kata-pin.toml",
        "/etc/containerd/conf.d/kata-pin-class-kata-cpus-4.toml",
    ]
    assert made.files[0].content == kata.read_bytes()
    assert made.files[2].content == b"[hypervisor.qemu]\noverhead_vcpus = 4.2\n"
    assert handler_in(made.files[3], "kata-cpus-4") == {
        "runtime_type": "io.containerd.kata.v2",
        "privileged_without_host_devices": True,
        "pod_annotations": ["io.katacontainers.*"],
        "base_runtime_spec": "/etc/kata-pin/containerd/kata.json",
        "options": {
            "ConfigPath": f"{folder}/configuration.toml",
            "TypeUrl": "runtimeoptions.v1.Options",
        },
    }
    assert "handler: kata-cpus-4\noverhead:\n  podFixed:" in made.runtime_class


def test_written_below_a_root_it_sizes_vms_and_goes(kata: Path, tmp_path: Path) -> None:
    """Kata's rules give its VMs 5 vCPUs; another install keeps it; uninstall leaves nothing."""
    made, node = plan(4, "", fake(str(kata))), NodeFiles(str(tmp_path / "root"))
    (tmp_path / "root" / "etc").mkdir(parents=True)
    assert {change.verb for change in node.preview(made.files)} == {"would write"}
    node.install([NodeFile("/etc/kata-pin/other", b"")])
    assert {change.verb for change in node.add(made.files)} == {"wrote"}
    placed = tmp_path / "root" / made.files[0].path[1:]
    read = read_kata_config(str(placed))
    assert read.configs[0].debug, "the drop-in of the base counts too"
    sizing = sizing_of(read.configs[0], str(placed), 16)
    assert vm_size(sizing, exclusive_pod(4, quota=False)).boot == 5
    assert {change.verb for change in node.preview(made.files)} == {"unchanged"}
    assert [change.verb for change in node.install([])] == ["removed"]  # of install, not the class
    assert placed.exists()
    removed = node.uninstall()
    assert [change.path for change in removed] == [file.path for file in reversed(made.files)]
    assert not (tmp_path / "root" / MANIFEST[1:]).exists()
    assert not placed.parent.exists()
    assert kata.read_text() == CONFIG


def test_lines_where_a_drop_in_would_replace_tables(kata: Path) -> None:
    """1.7: no drop-in of containerd; its table is told instead."""
    made = plan(2, "kata", fake(str(kata), merges=False))
    assert all(file.path.startswith(CLASSES) for file in made.files)
    assert f'[plugins."{PLUGIN}".containerd.runtimes."kata-cpus-2"]' in made.table


def test_a_table_that_was_added_by_hand(kata: Path) -> None:
    """It is in force, and a drop-in would still change other settings."""
    made = plan(2, "kata", fake(str(kata), merges=False))
    config = fake(str(kata))(()) + "".join(made.table.partition("\n[")[1:])
    again = plan(2, "kata", lambda _: config)
    assert (again.files, again.table) == (made.files, "")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('hypervisor_name = "qemu"', "", "Kata's Go runtime has no overhead_vcpus"),
        ("overhead_vcpus = 0.2", "", "no overhead_vcpus before 4.0"),
        ("mgmt = true", "mgmt = false", "static_sandbox_resource_mgmt is false"),
        ("qemu", "clh", "tested with QEMU only, not with clh"),
        ("[hypervisor.qemu]", "[hypervisor.qemu", "configuration.toml"),
    ],
)
def test_where_it_would_not_help(kata: Path, old: str, new: str, why: str) -> None:
    """Nothing is planned where the remedy does not work, and the reason is said."""
    kata.write_text(CONFIG.replace(old, new))
    with pytest.raises(KataPinError, match=why):
        plan(4, "kata", fake(str(kata)))


def test_which_handler(kata: Path) -> None:
    """A name that there is not is an error that lists those of Kata; a class is none of them."""
    with pytest.raises(KataPinError, match="runc is not a handler of Kata") as error:
        plan(4, "runc", fake(str(kata)))
    assert error.value.hint == "containerd's handlers of Kata: kata"
    a_class = plan(2, "", fake(str(kata))).files[-1].content.decode()
    config = fake(str(kata))(()) + "".join(a_class.partition("\n[")[1:])
    assert plan(4, "", lambda _: config).name == "kata-cpus-4"
