"""Which PCI devices VFIO gave to a process, by the groups and devices that it has open.

Facts: drivers/vfio: /dev/vfio/<group> stands for the devices in /sys/kernel/iommu_groups/<group>;
/dev/vfio/devices/vfio<n> (Linux 6.6) for one, /sys/class/vfio-dev/vfio<n>/device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from kata_pin.host.root import HostRoot

MAX_OPEN: Final = 4096
"""Most descriptors of a process that are looked at."""

_GROUP: Final = re.compile(r"/dev/vfio/(?:noiommu-)?([0-9]{1,9})\Z")
_DEVICE: Final = re.compile(r"/dev/vfio/devices/(vfio[0-9]{1,9})\Z")


def vfio_devices(root: HostRoot, pid: int) -> frozenset[str]:
    """Return the PCI addresses of a process's devices; none where that cannot be read."""
    found: set[str] = set()
    with suppress(OSError):
        folder = root.proc(pid, "fd")
        for name in root.calls.listdir(folder)[:MAX_OPEN]:
            with suppress(OSError):
                found.update(_addresses(root, root.calls.readlink(f"{folder}/{name}")))
    return frozenset(found)


def _addresses(root: HostRoot, target: str) -> Iterator[str]:
    group, device = _GROUP.match(target), _DEVICE.match(target)
    if group is not None:
        yield from os.listdir(root.sys("kernel/iommu_groups", group[1], "devices"))
    elif device is not None:
        yield os.path.basename(os.readlink(root.sys("class/vfio-dev", device[1], "device")))
