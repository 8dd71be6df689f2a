"""The pools of a node without containers, as the settings allow. Pure."""

from __future__ import annotations

from kata_pin.model.alloc import AllocState
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.settings import AllocSettings
from kata_pin.model.topology import HostTopology


def initial_state(topology: HostTopology, settings: AllocSettings) -> AllocState:
    """Return the state of a node without containers.

    If the settings leave no CPU for the shared pool (the rest is offline), the whole host is
    shared: containers have to run somewhere.
    """
    online = CpuSet(cpu.cpu for cpu in topology.cpus)
    allowed = online - topology.isolated if settings.cpus is None else settings.cpus
    housekeeping = settings.housekeeping & online
    kept_out = housekeeping | (settings.reserved if settings.strict_reserved else EMPTY)
    cpus = (allowed & online) - kept_out
    if not cpus:
        return AllocState(cpus=online, reserved=online)
    return AllocState(cpus, settings.reserved & online, housekeeping)
