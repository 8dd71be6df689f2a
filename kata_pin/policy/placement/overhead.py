"""Where threads that are not vCPUs go, and unpaired vCPUs (D11)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.node import Node
from kata_pin.model.placement import SandboxMask
from kata_pin.model.settings import Overhead, OverheadKind, PlacementSettings, VcpuMode
from kata_pin.model.thread import Task, Thread, ThreadRole
from kata_pin.policy.placement.want import Kind, Want

_LEAVE: Final = Overhead(OverheadKind.LEAVE)


def setting_for(settings: PlacementSettings, role: ThreadRole) -> Overhead:
    """Return the overhead setting of a role; the shim is not managed unless it has its own."""
    own = settings.overhead_roles.get(role)
    if own is not None:
        return own
    return _LEAVE if role is ThreadRole.SHIM else settings.overhead


def is_unmanaged(role: ThreadRole, settings: PlacementSettings) -> bool:
    """Return whether the settings leave threads of this role alone."""
    if role is ThreadRole.VCPU:
        return settings.vcpus is VcpuMode.LEAVE
    return setting_for(settings, role).kind is OverheadKind.LEAVE


def reserve_size(settings: PlacementSettings) -> int:
    """Return k: how many exclusive CPUs the settings reserve, the largest `reserve:k` of any role.

    Counted whether or not a thread of that role exists now, so that pairs stay when one appears.
    """
    every = (settings.overhead, *settings.overhead_roles.values())
    return max((one.reserve for one in every if one.kind is OverheadKind.RESERVE), default=0)


class OverheadHome:
    """The CPUs that each overhead setting means for one sandbox."""

    def __init__(self, mask: SandboxMask, reserved: Sequence[int], node: Node) -> None:
        """Take a mask that is not None and the reserved exclusive CPUs in order."""
        self._mask = mask.mask or EMPTY
        self._shared = mask.shared | mask.overhead_extra
        self._sandbox = self._mask | mask.overhead_extra
        self._reserved = reserved
        self._settings = node.settings
        self._online = node.topology.online
        kubelet = node.kubelet
        self._default = kubelet.default if kubelet is not None and kubelet.static else EMPTY
        self._live_threads = node.live_threads

    def wants(self, threads: Iterable[Thread]) -> Iterator[Want]:
        """Yield the want of each thread that is no vCPU and is managed."""
        for thread in threads:
            role = thread.role.role
            setting = setting_for(self._settings, role)
            if setting.kind is OverheadKind.LEAVE:
                continue
            is_main = role is ThreadRole.EMULATOR and thread.key.tid == thread.key.tgid
            if is_main and not self._live_threads:
                reason = "main thread: sandbox mask (new threads inherit it; no events report them)"
                yield Want(thread, self._mask, Kind.OVERHEAD, reason)
                continue
            cpus, reason = self._cpus(setting, thread.task)
            yield Want(thread, cpus, Kind.OVERHEAD, reason)

    def surplus(self, thread: Thread) -> Want | None:
        """Return the want of an unpaired vCPU, None when the setting is `leave`."""
        setting = setting_for(self._settings, ThreadRole.VCPU)
        if setting.kind is OverheadKind.LEAVE:
            return None
        cpus, reason = self._cpus(setting, thread.task)
        return Want(thread, cpus, Kind.SURPLUS, f"unpaired vCPU: {reason}")

    def _cpus(self, setting: Overhead, task: Task) -> tuple[CpuSet, str]:
        match setting.kind:
            case OverheadKind.AUTO:
                return self._auto(task)
            case OverheadKind.SANDBOX:
                return self._sandbox, "sandbox mask (overhead: sandbox)"
            case OverheadKind.HOUSEKEEPING:
                return self._settings.housekeeping, "housekeeping CPUs (overhead: housekeeping)"
            case OverheadKind.RESERVE:
                # [-0:] would be everything
                cpus = self._reserved[-setting.reserve :] if setting.reserve > 0 else ()
                return CpuSet(cpus), f"last exclusive CPUs (overhead: {setting})"
            case _:
                return setting.cpus, f"configured CPUs (overhead: {setting})"

    def _auto(self, task: Task) -> tuple[CpuSet, str]:
        if self._shared:
            return self._shared, "shared CPUs (overhead: auto)"
        reachable = self._default & self._online
        if task.cpuset:
            reachable &= task.cpuset
        if reachable:
            return self._default, "kubelet's default set (overhead: auto)"
        return self._sandbox, "sandbox mask, no shared CPU is reachable (overhead: auto)"
