"""The settings of pinning inside the guest (DESIGN D12): the section `guest`.

On by default: only what is measured or proven is acted on, the request is the one that Kata itself
sends at each update, and a guest that refuses or is silent changes nothing on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.config.kinds import BOOLEAN, integer
from kata_pin.config.row import setting


@dataclass(frozen=True)
class Guest:
    """Containers' cpusets inside the guest, set by its kata-agent."""

    enabled: bool = setting(
        BOOLEAN,
        default=True,
        help_text="whether each container's processes are kept on the guest CPUs of its own vCPUs",
    )
    act_on_inferred: bool = setting(
        BOOLEAN,
        default=False,
        help_text="also act where it is only inferred which guest CPU a vCPU is: those that were "
        "hotplugged into a guest whose kernel no lab run has covered",
    )
    exec: bool = setting(
        BOOLEAN,
        default=False,
        help_text="run cat in a container, as nobody, to read the guest's CPUs and cpusets; "
        "without it what was set is not read back",
    )
    connect_ms: int = setting(
        integer(1, 60000), 1000, "longest wait for a connection to the agent", unit="milliseconds"
    )
    call_ms: int = setting(
        integer(1, 60000), 2000, "longest wait for an answer of the agent", unit="milliseconds"
    )
