"""The allocation policy that the configuration names: ours, or another package's.

Other packages provide policies by entry points of the group `kata_pin.policies`. Only the named one
is loaded; its errors count as a wrong setting and never end the daemon.
"""

from __future__ import annotations

from kata_pin.config.alloc import Alloc
from kata_pin.errors import ConfigError, KataPinError
from kata_pin.model.topology import HostTopology
from kata_pin.policy.alloc.policies import BUILTIN, create
from kata_pin.policy.alloc.policy import GROUP, Factory, Policy


def make_policy(settings: Alloc, topology: HostTopology) -> Policy:
    """Return the policy for a host; raises ConfigError that names what is wrong."""
    name = settings.policy
    third = {} if name in BUILTIN else _third(name)
    try:
        return create(name, topology, settings.settings, third)
    except KataPinError:
        raise
    except Exception as error:
        if name in BUILTIN:
            raise
        raise ConfigError(f"policy {name!r} cannot be made: {error}", key="alloc.policy") from error


def _third(name: str) -> dict[str, Factory]:
    from importlib.metadata import entry_points  # noqa: PLC0415 - costs time that few need

    found = entry_points(group=GROUP, name=name)
    try:
        return {entry.name: entry.load() for entry in found}
    except Exception as error:
        raise ConfigError(
            f"policy {name!r} cannot be loaded: {error}", key="alloc.policy"
        ) from error
