"""Which PCI devices VFIO gave to a process: by groups, and by devices of Linux 6.6."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kata_pin.linux import process
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.linux.process import vfio_devices
from kata_pin.rights.broker import threads

PID = 4100
CARD, DISK, OTHER = "0000:3b:00.0", "0000:3c:00.1", "0000:3d:00.0"


@pytest.fixture
def root(tmp_path: Path) -> HostRoot:
    """Two groups, of which the first has two devices, and a device with a file of its own."""
    for group, devices in (("7", (CARD, DISK)), ("8", (OTHER,))):
        for device in devices:
            (tmp_path / f"sys/kernel/iommu_groups/{group}/devices/{device}").mkdir(parents=True)
    (tmp_path / f"sys/devices/pci0000:3a/{OTHER}").mkdir(parents=True)
    link = tmp_path / "sys/class/vfio-dev/vfio3/device"
    link.parent.mkdir(parents=True)
    link.symlink_to(f"../../../devices/pci0000:3a/{OTHER}")
    return HostRoot(str(tmp_path))


def _opens(root: HostRoot, *targets: str) -> None:
    folder = Path(root.proc(PID, "fd"))
    folder.mkdir(parents=True)
    for number, target in enumerate(targets):
        (folder / str(number)).symlink_to(target)


@pytest.mark.parametrize(
    ("targets", "devices"),
    [
        (["/dev/null", "socket:[1]"], set()),
        (["/dev/vfio/vfio", "/dev/vfio/7"], {CARD, DISK}),
        (["/dev/vfio/noiommu-8"], {OTHER}),
        (["/dev/vfio/devices/vfio3", "/dev/iommu"], {OTHER}),
        (["/dev/vfio/7", "/dev/vfio/devices/vfio3"], {CARD, DISK, OTHER}),
        (["/dev/vfio/99", "/dev/vfio/devices/vfio99", "/dev/vfio/8"], {OTHER}),
        (["/dev/vfio/7/../8", "/dev/vfio/7x", "/tmp/dev/vfio/7", "/dev/vfio/devices/7"], set()),
    ],
    ids=["none", "group", "no IOMMU", "device", "both", "gone", "other names"],
)
def test_devices(root: HostRoot, targets: list[str], devices: set[str]) -> None:
    """By what a process has open; a group or device that is gone does not hide the others."""
    _opens(root, *targets)
    assert vfio_devices(root, PID) == devices


def test_what_cannot_be_read(root: HostRoot) -> None:
    """A process that ended has none; a descriptor that cannot be read is left out."""
    assert vfio_devices(root, PID) == frozenset()
    _opens(root, "/dev/vfio/7", "/dev/vfio/8")

    (Path(root.proc(PID, "fd")) / "0").unlink()
    (Path(root.proc(PID, "fd")) / "0").mkdir()
    assert vfio_devices(root, PID) == {OTHER}


def test_no_more_descriptors_than_a_bound(root: HostRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have a million open."""
    monkeypatch.setattr(threads, "MAX_OPEN", 1)
    _opens(root, "/dev/vfio/7", "/dev/vfio/8")
    assert vfio_devices(root, PID) in ({CARD, DISK}, {OTHER})


def test_this_machine() -> None:
    """This process has none; the kernel's groups, where there are any, are read as they are."""
    assert vfio_devices(HOST, os.getpid()) == frozenset()
    groups = Path("/sys/kernel/iommu_groups")
    for group in sorted(groups.iterdir())[:4] if groups.is_dir() else ():
        found = set(process._addresses(HOST, f"/dev/vfio/{group.name}"))
        assert found == set(os.listdir(group / "devices"))
        assert found
