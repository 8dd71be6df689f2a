"""The bounds of what a grant carries beside CPUs, for every policy's decisions.

Refused are values that Linux or a runtime would refuse, classes that no rule of the administrator
names for the pod, mounts, devices and annotations that he does not list, what would resize a Kata
VM (Kata sizes it by its containers' quota, period, memory limit and hugepages, D14), and devices
that Kata does not pass into one. Pure, but for HostDevices.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from kata_pin.base.allocation import (
    AtCreation,
    AttachedDevice,
    Device,
    DeviceNode,
    Grant,
    Limits,
    Mount,
)
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.values import GrantKind
from kata_pin.linux.devices import locate, node_path
from kata_pin.linux.files import HostRoot
from kata_pin.options.allocation.demand import KINDS, permitted

_MAX_ENTRIES: Final = 16  # all of it is stored with the grants, at each decision
_MAX_VALUE: Final = 1024
_MAX_PATH: Final = 4096  # PATH_MAX
_MAX_BYTES: Final = 1 << 60
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_LOADER: Final = re.compile(r"PATH|LD_.*")
_PAGE_SIZE: Final = re.compile(r"[1-9][0-9]{0,3}(KB|MB|GB)")  # OCI runtime-spec, config-linux
_ANNOTATION: Final = re.compile(  # a label's key (apimachinery, IsQualifiedName)
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_OBEYED: Final = (
    "cdi.k8s.io/", "io.containerd.", "io.katacontainers.", "io.kubernetes.",
    "org.criu.", "org.systemd.property.", "run.oci.",
)  # fmt: skip
"""Annotations by which runtimes know a container, or which they obey."""

_VFIO: Final = re.compile(r"/dev/vfio/(noiommu-)?[0-9]{1,9}")
_MODE: Final = 0o666
_ACCESS: Final = ("r", "w", "rw", "rm", "wm", "rwm")
_MAJORS, _MINORS = 1 << 12, 1 << 20  # include/linux/kdev_t.h
_KERNELS: Final = ("/proc", "/sys", "/dev")
_RANGES: Final = {
    "shares": (2, 1 << 18),  # kernel/sched/sched.h: MIN_SHARES, MAX_SHARES
    "quota_us": (1000, 8192 * 1_000_000),  # kernel/sched/core.c: 1 ms at least; all CPUs
    "period_us": (1000, 1_000_000),  # sched-bwc.rst
    "memory": (4 << 20, _MAX_BYTES),
}


def wrong_adjustment(grant: Grant, settings: Alloc) -> str:
    """Return what is wrong with what a grant carries beside CPUs; empty if nothing is."""
    if not grant.limits and not grant.creation:
        return ""
    if grant.kind is GrantKind.SANDBOX:
        return "limits or other adjustments for a VM"
    found = (
        *_wrong_limits(grant.limits),
        *_wrong_entries(grant.creation),
        *(text for mount in grant.creation.mounts for text in _wrong_mount(mount, settings)),
        *(text for device in grant.creation.devices for text in _wrong_device(device, settings)),
        *_wrong_annotations(grant.creation, settings),
        *_wrong_classes(grant, settings),
        *_resizing(grant),
    )
    return next(iter(found), "")


def _wrong_limits(limits: Limits) -> Iterator[str]:
    for name, (low, high) in _RANGES.items():
        value = getattr(limits, name)
        unlimited = name == "quota_us" and value == -1
        if value is not None and not unlimited and not low <= value <= high:
            yield f"{name} {value}, which is not within {low} to {high}"


def _wrong_entries(creation: AtCreation) -> Iterator[str]:
    keys: tuple[list[str], ...] = (
        [size for size, _ in creation.hugepages],
        [name for name, _ in creation.env],
        [mount.destination for mount in creation.mounts],
        [device.path for device in creation.devices],
        [key for key, _ in creation.annotations],
    )
    if any(len(one) > _MAX_ENTRIES for one in keys):
        yield f"more than {_MAX_ENTRIES} page sizes, variables, mounts, devices or annotations"
    if any(len(set(one)) < len(one) for one in keys):
        yield "a page size, variable, mount, device or annotation twice"
    for size, limit in creation.hugepages:
        if not _PAGE_SIZE.fullmatch(size) or not 0 <= limit <= _MAX_BYTES:
            yield f"an invalid hugepage limit: {_shown(size)}: {limit}"
    for name, value in creation.env:
        if not _ENV_NAME.fullmatch(name) or _LOADER.fullmatch(name):
            yield f"an environment variable that policies may not set: {_shown(name)}"
        if len(value) > _MAX_VALUE or not value.isprintable():
            yield f"an invalid value of the environment variable {_shown(name)}"


def _wrong_mount(mount: Mount, settings: Alloc) -> Iterator[str]:
    for path in (mount.destination, mount.source):
        if not _is_path(path):
            yield f"a mount whose path is not absolute and normalized: {_shown(path)}"
    if any(_within(mount.destination, one) for one in _KERNELS):
        yield f"a mount over {_shown(mount.destination)}"
    if not any(_within(mount.source, one) for one in settings.mount_sources):
        yield f"a mount from outside alloc.mount_sources: {_shown(mount.source)}"


def _wrong_device(device: Device, settings: Alloc) -> Iterator[str]:
    shown = _shown(device.path)
    if not _is_path(device.path) or not any(_within(device.path, one) for one in settings.devices):
        yield f"a device that alloc.devices does not list: {shown}"
    if not device.path.startswith("/dev/"):
        yield f"a device outside /dev: {shown}"
    if device.kind not in {"c", "b"}:
        yield f"a device that is neither c nor b: {shown}"
    if not (0 <= device.major < _MAJORS and 0 <= device.minor < _MINORS):
        yield f"invalid numbers of the device {shown}: {device.major}:{device.minor}"
    if device.mode & ~_MODE or device.mode < 0 or device.access not in _ACCESS:
        yield f"an invalid mode or rule of the device {shown}"


def _wrong_annotations(creation: AtCreation, settings: Alloc) -> Iterator[str]:
    for key, value in creation.annotations:
        if not _ANNOTATION.fullmatch(key) or key not in settings.annotation_keys:
            yield f"an annotation that alloc.annotation_keys does not list: {_shown(key)}"
        if key.startswith(_OBEYED):
            yield f"an annotation that runtimes obey: {_shown(key)}"
        if len(value) > _MAX_VALUE or not value.isprintable():
            yield f"an invalid value of the annotation {_shown(key)}"


def _needs_hot_plug(device: Device) -> bool:
    """Whether Kata can pass a character device into a VM only by VFIO."""
    return _VFIO.fullmatch(device.path) is not None


def _wrong_classes(grant: Grant, settings: Alloc) -> Iterator[str]:
    for kind in KINDS:
        name = getattr(grant.creation, kind.field)
        if name and name not in permitted(grant.request.pod, kind, settings):
            yield f"a {kind.title} that no rule names for its pod: {_shown(name)}"


def _resizing(grant: Grant) -> Iterator[str]:
    """Yield what would change the size of a Kata VM, or has no effect on one."""
    if not grant.request.pod.kata:
        return
    limits, creation = grant.limits, grant.creation
    if (limits.quota_us, limits.period_us, limits.memory) != (None,) * 3 or creation.hugepages:
        yield "a quota, period, memory limit or hugepages, which would resize its Kata VM"
    if creation.rdt_class or creation.blockio_class:
        yield "a class, which has no effect on a Kata VM"
    for (
        device
    ) in creation.devices:  # anything else would be a node of the same numbers in the guest
        if device.kind == "c" and not _needs_hot_plug(device):
            yield f"a device that cannot be passed into a Kata VM: {_shown(device.path)}"


def _is_path(path: str) -> bool:
    plain = path.startswith("/") and path.isprintable() and len(path) <= _MAX_PATH
    return plain and path not in {"/", "//"} and posixpath.normpath(path) == path


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _shown(value: str) -> str:
    return repr(value[:40])


class HostDevices(Struct, frozen=True):
    """Knows the host's devices; `hot_plug`: a configuration of Kata lets VFIO devices be added."""

    root: HostRoot
    hot_plug: bool = False

    def locate(self, device: DeviceNode) -> AttachedDevice:
        """Return where a container's device is."""
        return locate(self.root, device)

    def wrong(self, grant: Grant | None) -> str:
        """Return which device of a new container is not what its path says; empty if none."""
        if grant is None:
            return ""
        for device in grant.creation.devices:
            named = node_path(self.root, device)
            numbers = f"{device.kind} {device.major}:{device.minor}"
            if named != device.path:
                owner = f"is {named}" if named else "has no name in sysfs"
                return f"the device {device.path} as {numbers}, which {owner}"
            if grant.request.pod.kata and _needs_hot_plug(device) and not self.hot_plug:
                return (
                    f"the device {device.path} for a Kata VM, but no configuration of Kata has "
                    "hot_plug_vfio"
                )
        return ""
