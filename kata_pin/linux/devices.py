"""Where the host's devices are: their kernel names, PCI addresses and NUMA nodes, from sysfs.

Facts: /sys/dev/{char,block}/MAJOR:MINOR links to a device's folder, whose `uevent` has the name of
its node below /dev (DEVNAME); the folders above it are the devices that it belongs to, up to the
PCI function, which has `numa_node` (-1: the firmware names none) and, for a virtual function of
SR-IOV, `physfn`. A VFIO group (/dev/vfio/N) stands for the devices of
/sys/kernel/iommu_groups/N/devices.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from kata_pin.base.allocation import AttachedDevice, DeviceNode
from kata_pin.linux.files import HostRoot, read_text

MAX_GROUP: Final = 64
"""Devices of a VFIO group that are looked at."""

_FOLDERS: Final = {"c": "char", "b": "block"}
_PCI: Final = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\Z")
_GROUP: Final = re.compile(r"/virtual/vfio/(?:noiommu-)?([0-9]{1,9})\Z")
_NODE: Final = re.compile(r"-?[0-9]{1,6}\Z")
_DEVNAME: Final = re.compile(r"^DEVNAME=([^\n]{1,255})$", re.MULTILINE)


def node_path(root: HostRoot, device: DeviceNode) -> str:
    """Return the path below /dev that the kernel gives to a device's numbers; empty if none."""
    folder = _folder(root, device)
    with suppress(OSError, UnicodeDecodeError):
        named = _DEVNAME.search(read_text(f"{folder}/uevent"))
        return f"/dev/{named[1]}" if named else ""
    return ""


def locate(root: HostRoot, device: DeviceNode) -> AttachedDevice:
    """Return where a device of a container is, by its numbers: its path is the container's own."""
    folder = _folder(root, device)
    group = _GROUP.search(folder)
    if group is None:
        return AttachedDevice(device.path, *_place(root, folder))
    places = list(_group(root, group[1]))
    known = [place for place in places if place[1] >= 0]
    return AttachedDevice(device.path, *next(iter((*known, *places)), ("", -1)))


def pci_device(root: HostRoot, address: str) -> AttachedDevice | None:
    """Return a PCI device by its address (`0000:3b:00.1`, `3b:00.1`); None if there is none.

    Raises ValueError for a text that is no PCI address.
    """
    match = _PCI.match(address.lower())
    if match is None:
        raise ValueError(f"{address[:40]!r} is not a PCI address such as 0000:3b:00.1")
    full = f"{match[1] or '0000'}:{match[2]}"
    folder = root.sys("bus/pci/devices", full)
    return AttachedDevice(full, *_place(root, folder)) if os.path.isdir(folder) else None


def _folder(root: HostRoot, device: DeviceNode) -> str:
    """Return the folder of a device in sysfs, without links."""
    kind = _FOLDERS.get(device.kind, "char")
    return os.path.realpath(root.sys("dev", kind, f"{device.major}:{device.minor}"))


def _group(root: HostRoot, number: str) -> Iterator[tuple[str, int]]:
    """Yield the places of a VFIO group's devices, by address."""
    folder = root.sys("kernel/iommu_groups", number, "devices")
    with suppress(OSError):
        for name in sorted(os.listdir(folder))[:MAX_GROUP]:
            yield _place(root, os.path.join(folder, name))


def _place(root: HostRoot, folder: str) -> tuple[str, int]:
    """Return the PCI address and the NUMA node of a device, from its folder or those above.

    The nearest address is the device's own; a bridge above it knows the node where it does not. A
    virtual function without a node has that of its physical function.
    """
    top = os.path.realpath(root.sys("devices"))
    path, address, node = os.path.realpath(folder), "", -1
    while path.startswith(f"{top}/") and node < 0:
        pci = _PCI.match(os.path.basename(path)) is not None
        if pci and not address:
            address = os.path.basename(path)
        node = _node(path)
        if node < 0 and pci:
            node = _node(os.path.join(path, "physfn"))
        path = os.path.dirname(path)
    return address, node


def _node(folder: str) -> int:
    with suppress(OSError, UnicodeDecodeError):
        text = read_text(os.path.join(folder, "numa_node")).strip()
        return int(text) if _NODE.match(text) else -1
    return -1
