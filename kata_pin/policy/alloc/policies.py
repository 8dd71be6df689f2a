"""The policies by name: `static`, `annotation`, `topology`, and those of other packages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from kata_pin.errors import ConfigError
from kata_pin.model.settings import AllocSettings, ManagerPolicy
from kata_pin.model.topology import HostTopology
from kata_pin.policy.alloc.choice import Choice, KubeletChoice
from kata_pin.policy.alloc.demand import annotated_demand, static_demand, topology_demand
from kata_pin.policy.alloc.options import StaticOptions
from kata_pin.policy.alloc.policy import Factory, Policy
from kata_pin.policy.alloc.pooled import PooledPolicy
from kata_pin.policy.alloc.topology import Machine
from kata_pin.policy.alloc.zones import ZoneChoice


def static(topology: HostTopology, settings: AllocSettings) -> Policy:
    """Return the policy `static`: eligible containers get exclusive CPUs, as in the kubelet."""
    choice = partial(_kubelet_choice, settings.manager)
    return PooledPolicy("static", topology, settings, static_demand, choice, follows_memory=False)


def annotation(topology: HostTopology, settings: AllocSettings) -> Policy:
    """Return the policy `annotation`: pods choose none, share or exclusive if allowed."""
    choice = partial(_kubelet_choice, settings.manager)
    return PooledPolicy(
        "annotation", topology, settings, annotated_demand, choice, follows_memory=True
    )


def topology_aware(topology: HostTopology, settings: AllocSettings) -> Policy:
    """Return the policy `topology`: narrow zones, whole cores, pods close together, fractions."""
    return PooledPolicy(
        "topology", topology, settings, topology_demand, _zone_choice, follows_memory=True
    )


BUILTIN: Final[Mapping[str, Factory]] = {
    "static": static,
    "annotation": annotation,
    "topology": topology_aware,
}


def create(
    name: str,
    topology: HostTopology,
    settings: AllocSettings,
    third: Mapping[str, Factory] | None = None,
) -> Policy:
    """Return the policy of that name, ours before a third one (`policy.GROUP`).

    Raises ConfigError for an unknown name, and for settings that do not suit the host.
    """
    known = {**(third or {}), **BUILTIN}
    if name not in known:
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(known)}", key="policy")
    return known[name](topology, settings)


def _kubelet_choice(
    manager: ManagerPolicy, _: HostTopology, machine: Machine, options: StaticOptions
) -> Choice:
    return KubeletChoice(machine, options, manager)


def _zone_choice(topology: HostTopology, machine: Machine, _: StaticOptions) -> Choice:
    return ZoneChoice(topology, machine)
