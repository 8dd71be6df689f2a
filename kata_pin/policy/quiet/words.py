"""Rows of the report, and the words that several of them share. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.quiet.node import Unknown
from kata_pin.model.reports.doctor import Row

NAMED: Final = 3
"""Things that are named one by one."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """`exclusive` are pCPUs that pods own, `others` those that are left for everything else."""

    exclusive: CpuSet
    others: CpuSet


def not_known(check: str, why: Unknown, absent: str = "") -> Row:
    """Return the row of something that could not be read, or that this node does not have.

    `absent` is what to say in the latter case.
    """
    if why.absent:
        return Row(check, "info", absent or f"not on this node: {why.reason}")
    remedy = "run as root" if "ermission" in why.reason or "permitted" in why.reason else ""
    return Row(check, "warn", f"not readable: {why.reason}", remedy)


def named(cpus: CpuSet) -> str:
    """Return pCPUs in words, such as `exclusive pCPU 4` or `exclusive pCPUs 4-7`."""
    return f"exclusive pCPU{'' if len(cpus) == 1 else 's'} {cpus}"


MOST: Final = 16
"""Numbers up to which a command for all of them is worth showing."""


def setting_or(setting: str, values: Sequence[int], command: str) -> str:
    """Return a remedy: a setting, or a shell command for each of these numbers, `$i` in it."""
    if len(values) > MOST:
        return f"{setting} in the configuration"
    return f"{setting} in the configuration, or {_each(values, command)}"


def _each(values: Sequence[int], command: str) -> str:
    if len(values) == 1:
        return command.replace("$i", str(values[0]))
    return f"for i in {' '.join(map(str, values))}; do {command}; done"


def listed(names: Sequence[str]) -> str:
    """Return the first few names and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
