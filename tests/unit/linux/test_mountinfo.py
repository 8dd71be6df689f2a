"""Read-only mounts, as systemd and container runtimes make them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.linux.process import is_read_only

UNIT = rb"""21 1 8:1 / / ro,relatime shared:1 - ext4 /dev/vda1 rw
22 21 0:20 / /proc rw,nosuid shared:2 - proc proc rw
23 22 0:20 /irq /proc/irq ro,nosuid shared:2 - proc proc rw
24 21 0:21 / /sys ro,nosuid - sysfs sysfs rw
25 24 0:21 /devices /sys/devices rw,nosuid - sysfs sysfs rw
26 21 0:30 / /a\040b rw - tmpfs tmpfs ro
27 21 0:31 / /twice ro - tmpfs tmpfs rw
28 21 0:32 / /twice rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "read_only"),
    [
        *(("/proc/irq", True), ("/proc/irq/7/smp_affinity_list", True), ("/proc/irqs", False)),
        *(("/proc/sys/kernel/watchdog_cpumask", False), ("/sys/fs/resctrl", True)),
        *(("/sys/devices", False), ("/sys/devices/system/cpu", False), ("/etc", True)),
        *(("/a b/x", True), ("/twice/x", False)),
    ],
)
def test_the_deepest_mount_counts(path: str, read_only: bool) -> None:
    """Of the mount or of its file system; the last of several on one folder."""
    assert is_read_only(UNIT, path) is read_only


def test_this_machine() -> None:
    """Its own file has a mount for everything."""
    data = Path("/proc/self/mountinfo").read_bytes()
    assert is_read_only(data, "/proc/self") in {True, False}


@pytest.mark.parametrize("data", [b"", b"1 2 3\n", b"\0" * 100])
def test_no_mount(data: bytes) -> None:
    """An error, never a guess."""
    with pytest.raises(ParseError):
        is_read_only(data, "/proc/irq")
