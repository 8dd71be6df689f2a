"""vCPU threads from KVM's debugfs: `kvm/<tid>-<vm fd>/vcpu<N>/pid` (virt/kvm/kvm_main.c).

The best source: right also for a busy vCPU, and no user process can write it. The folder is named
after the thread that made the VM: QEMU's main thread, but not cloud-hypervisor's or Dragonball's. N
is KVM's vCPU id (the APIC id on x86). The file names the thread that last entered KVM_RUN: 0 before
the first time, and still the dead one after an unplug. A thread that is younger than the vCPU may
therefore be a later thread with a reused tid, or the new thread of a vCPU plugged again: it is
called doubtful, and needs a second source. Needs root and a mounted debugfs; absent files are
simply no answer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from kata_pin.model.thread import ThreadKey
from kata_pin.vmm.host_access import HostPaths

MAX_ENTRIES: Final = 65_536

_VCPU: Final = re.compile(r"vcpu([0-9]{1,5})\Z")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_SLACK_TICKS: Final = 2
"""A thread creates its vCPU at once, but starttime is cut to a tick and clocks are read apart."""


@dataclass(frozen=True)
class VcpuThreads:
    """KVM's vCPU id by thread; `doubtful` are those that need a second source."""

    ids: Mapping[ThreadKey, int] = field(default_factory=dict)
    doubtful: frozenset[ThreadKey] = frozenset()


NOTHING: Final = VcpuThreads()


def read_vcpus(root: HostPaths, tasks: Mapping[int, ThreadKey], pid: int) -> VcpuThreads:
    """Return which of a VMM's threads (by tid) KVM knows as vCPUs."""
    ids: dict[ThreadKey, int] = {}
    doubtful: set[ThreadKey] = set()
    for vm in _vms(root, {*map(str, tasks), str(pid)}):
        for name in _list(root, vm):
            match = _VCPU.match(name)
            key = tasks.get(_pid(root, f"{vm}/{name}/pid")) if match else None
            if match is None or key is None:
                continue
            if key in ids:  # two vCPUs cannot share a thread: one of them is unplugged
                doubtful.add(key)
            ids[key] = int(match[1])
            if _is_younger(root, key, f"{vm}/{name}"):
                doubtful.add(key)
    return VcpuThreads(ids, frozenset(doubtful))


def _vms(root: HostPaths, tids: Collection[str]) -> list[str]:
    folder = root.debug("kvm")
    return [f"{folder}/{name}" for name in _list(root, folder) if name.partition("-")[0] in tids]


def _list(root: HostPaths, path: str) -> list[str]:
    try:
        return root.calls.listdir(path)[:MAX_ENTRIES]
    except OSError:
        return []


def _pid(root: HostPaths, path: str) -> int:
    try:
        text = root.calls.read(path, 32).strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def _is_younger(root: HostPaths, key: ThreadKey, vcpu: str) -> bool:
    """Whether the thread started after the vCPU was created; yes when that cannot be known."""
    try:
        created = root.calls.stat(vcpu).modified_ns / 1e9
    except OSError:
        return True
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return key.starttime > (created - booted) * _TICKS + _SLACK_TICKS
