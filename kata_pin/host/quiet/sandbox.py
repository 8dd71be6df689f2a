"""What limits a sandbox's threads on their own pCPUs: CPU quota, and core scheduling.

Facts: Documentation/scheduler/sched-bwc.rst and cgroup-v2.rst (cpu.max);
Documentation/admin-guide/hw-vuln/core-scheduling.rst (PR_SCHED_CORE).
"""

from __future__ import annotations

from errno import EINVAL, ENODEV, EPERM, ESRCH
from typing import Final

from kata_pin.broker.libc import libc
from kata_pin.host.measure.cgroups import CgroupFiles
from kata_pin.host.quiet.reading import known, text
from kata_pin.model.quiet.node import SandboxFacts, Unknown

_COOKIE: Final = {
    EINVAL: "this kernel has no core scheduling (CONFIG_SCHED_CORE)",
    ENODEV: "core scheduling needs SMT, which is off here",
    EPERM: "no permission to look into the process; run as root",
    ESRCH: "the process has exited",
}


def read_sandbox(
    files: CgroupFiles, sandbox: str, pod: str, *, vmm: int | None, vcpu: int | None
) -> SandboxFacts:
    """Return the facts of a sandbox with this VMM and one of its vCPU threads; never raises.

    `files` are those of the cpu controller.
    """
    if vmm is None:
        gone = Unknown("no VMM is known")
        return SandboxFacts(sandbox, pod, gone, gone, gone)
    folders = files.folders(vmm, vcpu or vmm)
    if folders is None:
        quota: float | Unknown | None = Unknown(f"the cgroup of process {vmm} is not known")
        return SandboxFacts(sandbox, pod, quota, Unknown("its cgroup is not known"), cookie(vmm))
    quota = _quota(folders)
    found = files.throttling(folders)
    throttled: tuple[int, float] | Unknown = Unknown("no cpu.stat can be read")
    if found is not None:
        throttled = found.times, found.ns / 1e9
    return SandboxFacts(sandbox, pod, quota, throttled, cookie(vcpu or vmm))


def _quota(folders: list[str]) -> float | Unknown | None:
    """Return the smallest quota of these cgroups in CPUs, None if there is none."""
    found: list[float] = []
    for folder in folders:
        one = known(f"{folder}/cpu.max", lambda data: _share(text(data)))
        if isinstance(one, Unknown) and one.absent:
            one = _quota_v1(folder)
        if isinstance(one, Unknown):
            return one
        found += [] if one is None else [one]
    return min(found, default=None)


def _quota_v1(folder: str) -> float | Unknown | None:
    quota = known(f"{folder}/cpu.cfs_quota_us", int)
    period = known(f"{folder}/cpu.cfs_period_us", int)
    if isinstance(quota, Unknown):
        return None if quota.absent else quota  # without the controller nothing limits
    if isinstance(period, Unknown):
        return period
    return quota / period if quota > 0 and period > 0 else None


def _share(content: str) -> float | None:
    quota, period = content.split()
    return None if quota == "max" else int(quota) / int(period)


def cookie(pid: int) -> int | Unknown:
    """Return the core-scheduling cookie of a thread, 0 for none; never raises."""
    try:
        return libc().core_cookie(pid)
    except OSError as error:
        return Unknown(_COOKIE.get(error.errno or 0, error.strerror or "unknown error"))
