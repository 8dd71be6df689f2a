"""The settings of cpusets inside the guest: the section `guest`."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.config.kinds import integer, setting


@dataclass(frozen=True)
class Guest:
    """Cpusets of containers inside the guest, set by the kata-agent."""

    enabled: bool = setting(
        True, "keep each container's processes on the guest CPUs of its own vCPUs"
    )
    act_on_inferred: bool = setting(
        False,
        "also act where a vCPU's guest CPU is only inferred: hotplugged vCPUs of a guest kernel "
        "that no lab run has covered",
    )
    exec: bool = setting(
        False,
        "run cat in a container, as user nobody, to read the guest's CPUs and cpusets; without it, "
        "what was set is not read back",
    )
    connect_ms: int = setting(
        1000, "longest wait for a connection to the agent", integer(1, 60000, "milliseconds")
    )
    call_ms: int = setting(
        2000, "longest wait for an answer of the agent", integer(1, 60000, "milliseconds")
    )
