"""Idle states and frequency of pCPUs.

Facts: Documentation/ABI/testing/sysfs-devices-power (pm_qos_resume_latency_us: `0` sets no limit,
`n/a` allows no idle state), admin-guide/pm/cpufreq.rst (the files belong to a policy, which may
cover several CPUs).
"""

from __future__ import annotations

import os
import re
from typing import Final

from kata_pin.host.quiet.reading import known, text
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.quiet.node import FrequencyPolicy, Power, Unknown

_POLICY: Final = re.compile(r"policy([0-9]{1,4})\Z")


def read_power(root: HostRoot, cpu: int) -> Power:
    """Return idle-state limit and governor of a pCPU; never raises."""
    base = root.sys("devices/system/cpu", f"cpu{cpu}")
    shared = related(f"{base}/cpufreq")
    return Power(
        latency=read_idle_limit(root, cpu),
        governor=known(f"{base}/cpufreq/scaling_governor", text),
        shared=CpuSet([cpu]) if isinstance(shared, Unknown) else shared,
    )


def read_idle_limit(root: HostRoot, cpu: int) -> str | Unknown:
    """Return the limit of a pCPU's idle states (see Power); never raises."""
    base = root.sys("devices/system/cpu", f"cpu{cpu}")
    return known(f"{base}/power/pm_qos_resume_latency_us", text)


def read_policies(root: HostRoot) -> list[FrequencyPolicy]:
    """Return the frequency policies of the node, those that can be read; never raises."""
    base = root.sys("devices/system/cpu/cpufreq")
    try:
        names = [match[1] for match in map(_POLICY.match, sorted(os.listdir(base))) if match]
    except OSError:
        return []
    found = []
    for name in names:
        folder = f"{base}/policy{name}"
        cpus = related(folder)
        governor = known(f"{folder}/scaling_governor", text)
        available = known(f"{folder}/scaling_available_governors", text)
        if not (
            isinstance(cpus, Unknown)
            or isinstance(governor, Unknown)
            or isinstance(available, Unknown)
        ):
            found.append(FrequencyPolicy(name, cpus, governor, frozenset(available.split())))
    return found


def related(policy: str) -> CpuSet | Unknown:
    """Return the pCPUs of a frequency policy; the file separates them by spaces."""
    return known(f"{policy}/related_cpus", lambda data: CpuSet(map(int, data.split())))
