"""The options of the static policy, by the kubelet's names, and which of them exclude each other.

Read from the configuration once at start. Kubelet policy_options.go without its feature gates:
every option is available.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from kata_pin.errors import ConfigError
from kata_pin.policy.alloc.topology import Machine

_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "FALSE", "false", "False"})


@dataclass(frozen=True, slots=True)
class StaticOptions:
    """The kubelet's options, each off by default, and one of this project's own.

    - full_pcpus_only: whole cores only, else SMTAlignmentError.
    - strict_cpu_reservation: reserved CPUs are not in the shared pool either.
    - distribute_cpus_across_numa: the distributed algorithm instead of the packed one.
    - prefer_align_cpus_by_uncorecache: packed, inside a last-level cache where that fits.
    - align_by_socket: a NUMA hint is widened to whole packages.
    - distribute_cpus_across_cores: packed, but single CPUs spread over cores.
    - true_unit_sizes (ours): cores and packages are counted by their own size, not by the host's
      average, so that whole cores of a hybrid host are recognised.
    """

    full_pcpus_only: bool = False
    strict_cpu_reservation: bool = False
    distribute_cpus_across_numa: bool = False
    prefer_align_cpus_by_uncorecache: bool = False
    align_by_socket: bool = False
    distribute_cpus_across_cores: bool = False
    true_unit_sizes: bool = False

    def __post_init__(self) -> None:
        for left, right in _REFUSED_PAIRS:
            if getattr(self, left) and getattr(self, right):
                raise ConfigError(
                    f"cannot be used together with {_written(right)}", key=_written(left)
                )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return every option's name as the kubelet writes it."""
        return tuple(_written(entry.name) for entry in fields(cls))

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> StaticOptions:
        """Read the kubelet's `cpuManagerPolicyOptions`: option name to a boolean text.

        Raises ConfigError for an unknown option, a text that Go's strconv.ParseBool refuses, and
        options that exclude each other.
        """
        known = {_written(field.name): field.name for field in fields(cls)}
        values: dict[str, bool] = {}
        for option, text in texts.items():
            if option not in known:
                raise ConfigError("unknown option of the static policy", key=option)
            if text not in _TRUE | _FALSE:
                raise ConfigError(f"{text!r} is not true or false", key=option)
            values[known[option]] = text in _TRUE
        return cls(**values)

    def check_against(self, machine: Machine, *, single_numa_node: bool = False) -> None:
        """Raise ConfigError if the host or the topology manager's policy rules an option out.

        `single_numa_node`: the topology manager has the policy of that name.
        """
        if not self.align_by_socket:
            return
        if single_numa_node:
            raise ConfigError(
                "cannot be used with the topology manager's policy single-numa-node",
                key=_written("align_by_socket"),
            )
        if len(machine.packages) > len(machine.nodes):
            raise ConfigError(
                f"cannot be used on a host with more packages ({len(machine.packages)}) "
                f"than NUMA nodes ({len(machine.nodes)})",
                key=_written("align_by_socket"),
            )


_REFUSED_PAIRS: Final = (
    ("full_pcpus_only", "distribute_cpus_across_cores"),
    ("distribute_cpus_across_numa", "distribute_cpus_across_cores"),
    ("prefer_align_cpus_by_uncorecache", "distribute_cpus_across_cores"),
    ("prefer_align_cpus_by_uncorecache", "distribute_cpus_across_numa"),
)


def _written(name: str) -> str:
    return name.replace("_", "-")
