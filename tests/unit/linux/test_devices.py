"""Where devices are: through classes, VFIO groups and virtual functions, up to a NUMA node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kata_pin.base.allocation import AttachedDevice, DeviceNode
from kata_pin.linux.devices import MAX_GROUP, locate, node_path, pci_device
from kata_pin.linux.files import HOST, HostRoot

NIC, VF, ORPHAN, NVME = "0000:3b:00.0", "0000:3b:02.1", "0000:3c:00.0", "0000:81:00.0"


class Tree:
    """A sysfs with a network card, a virtual function of it, a disk, and a card without a node."""

    def __init__(self, folder: Path) -> None:
        self.sys = folder / "sys"
        self.root = HostRoot(str(folder))
        for address, node in ((NIC, 1), (VF, -1), (ORPHAN, -1), (NVME, 0)):
            self.write(f"devices/pci0000:3a/{address}/numa_node", str(node))
            self.link(f"bus/pci/devices/{address}", f"devices/pci0000:3a/{address}")
        self.link(f"devices/pci0000:3a/{VF}/physfn", f"devices/pci0000:3a/{NIC}")

    def write(self, place: str, text: str) -> None:
        """Write a file."""
        path = self.sys / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def link(self, place: str, target: str) -> None:
        """Make a link to a folder, which need not be there."""
        path = self.sys / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(self.sys / target, path.parent))

    def device(self, kind: str, numbers: str, folder: str, name: str = "") -> DeviceNode:
        """Add a device with its numbers."""
        self.write(f"devices/{folder}/uevent", f"MAJOR=1\nDEVNAME={name}" if name else "MAJOR=1")
        self.link(f"dev/{'char' if kind == 'c' else 'block'}/{numbers}", f"devices/{folder}")
        major, minor = numbers.split(":")
        return DeviceNode("/dev/given", kind, int(major), int(minor))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_disk_has_the_node_of_its_controller(tree: Tree) -> None:
    """The path is the container's, which may differ from the host's."""
    folder = f"pci0000:3a/{NVME}/nvme/nvme0/nvme0n1"
    tree.write(f"devices/pci0000:3a/{NVME}/nvme/nvme0/numa_node", "-1")
    disk = tree.device("b", "259:0", folder, "nvme0n1")
    assert locate(tree.root, disk) == AttachedDevice("/dev/given", NVME, 0)
    assert node_path(tree.root, disk) == "/dev/nvme0n1"


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ((NIC,), (NIC, 1)),
        ((VF,), (VF, 1)),
        ((ORPHAN, VF), (VF, 1)),
        ((ORPHAN,), (ORPHAN, -1)),
        ((), ("", -1)),
    ],
    ids=["function", "virtual function", "the one with a node", "no node", "empty group"],
)
@pytest.mark.parametrize("name", ["12", "noiommu-12"])
def test_a_vfio_group(
    tree: Tree, members: tuple[str, ...], expected: tuple[str, int], name: str
) -> None:
    """It stands for its devices; a virtual function is where its physical one is."""
    group = tree.device("c", "240:3", f"virtual/vfio/{name}", f"vfio/{name}")
    for member in members:
        tree.link(f"kernel/iommu_groups/12/devices/{member}", f"devices/pci0000:3a/{member}")
    assert locate(tree.root, group) == AttachedDevice("/dev/given", *expected)
    assert node_path(tree.root, group) == f"/dev/vfio/{name}"


def test_a_vfio_device_of_its_own(tree: Tree) -> None:
    """Linux 6.6: the device's folder lies in the PCI function's."""
    own = tree.device("c", "511:0", f"pci0000:3a/{VF}/vfio-dev/vfio0", "vfio/devices/vfio0")
    assert locate(tree.root, own) == AttachedDevice("/dev/given", VF, 1)


def test_devices_without_a_node(tree: Tree) -> None:
    """A virtual device, numbers that nothing has, and a damaged file."""
    fuse = tree.device("c", "10:229", "virtual/misc/fuse", "fuse")
    assert locate(tree.root, fuse) == AttachedDevice("/dev/given")
    assert locate(tree.root, DeviceNode("/dev/x", "c", 9, 9)) == AttachedDevice("/dev/x")
    assert node_path(tree.root, DeviceNode("/dev/x", "c", 9, 9)) == ""
    assert node_path(tree.root, tree.device("c", "1:1", "virtual/nameless")) == ""
    tree.write(f"devices/pci0000:3a/{ORPHAN}/numa_node", "many")
    assert pci_device(tree.root, ORPHAN) == AttachedDevice(ORPHAN, ORPHAN)


def test_a_large_group_is_looked_at_in_part(tree: Tree) -> None:
    """A container's creation waits for the answer."""
    group = tree.device("c", "240:3", "virtual/vfio/12", "vfio/12")
    for number in range(MAX_GROUP):
        (tree.sys / f"kernel/iommu_groups/12/devices/0000:00:{number:02x}.0").mkdir(parents=True)
    tree.link(f"kernel/iommu_groups/12/devices/{NIC}", f"devices/pci0000:3a/{NIC}")
    assert locate(tree.root, group).node == -1


@pytest.mark.parametrize("text", [NIC, "3b:00.0", "0000:3B:00.0"])
def test_by_pci_address(tree: Tree, text: str) -> None:
    """As lspci prints it, with or without the domain."""
    assert pci_device(tree.root, text) == AttachedDevice(NIC, NIC, 1)
    assert pci_device(tree.root, "0000:ff:00.0") is None


@pytest.mark.parametrize("text", ["", "eth0", "../../etc", "0000:3b:00.8", "3b:00.0/.."])
def test_no_pci_address(tree: Tree, text: str) -> None:
    """It would become part of a path."""
    with pytest.raises(ValueError, match="not a PCI address"):
        pci_device(tree.root, text)


def test_this_machine() -> None:
    """A real sysfs: the kernel names /dev/null, which is nowhere."""
    null = DeviceNode("/dev/null", "c", 1, 3)
    assert node_path(HOST, null) == "/dev/null"
    assert locate(HOST, null) == AttachedDevice("/dev/null")
