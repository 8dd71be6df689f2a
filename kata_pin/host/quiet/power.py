"""Idle states and frequency of pCPUs.

Facts: Documentation/ABI/testing/sysfs-devices-power (pm_qos_resume_latency_us: `0` sets no limit,
`n/a` allows no idle state), admin-guide/pm/cpufreq.rst (the files belong to a policy, which may
cover several CPUs).
"""

from __future__ import annotations

from kata_pin.host.quiet.reading import known, text
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.quiet.node import Power, Unknown


def read_power(root: HostRoot, cpu: int) -> Power:
    """Return idle-state limit and governor of a pCPU; never raises."""
    base = root.sys("devices/system/cpu", f"cpu{cpu}")
    shared = cpu_list_of_policy(f"{base}/cpufreq")
    return Power(
        latency=known(f"{base}/power/pm_qos_resume_latency_us", text),
        governor=known(f"{base}/cpufreq/scaling_governor", text),
        shared=CpuSet([cpu]) if isinstance(shared, Unknown) else shared,
    )


def cpu_list_of_policy(policy: str) -> CpuSet | Unknown:
    """Return the pCPUs of a frequency policy; the file separates them by spaces."""
    return known(f"{policy}/related_cpus", lambda data: CpuSet(map(int, data.split())))
