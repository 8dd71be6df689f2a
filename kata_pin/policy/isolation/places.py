"""What a cgroup's path says of a task: its systemd unit, its pod, its container. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_POD: Final = re.compile(
    r"(?:^|[-/])pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
    r"|[0-9a-f]{32})(?:\.slice)?\Z"
)
_UNIT: Final = re.compile(r"[^/]+\.(?:service|scope|slice)\Z")
_USER_MANAGER: Final = re.compile(r"user@[0-9]+\.service\Z")
"""The one unit of the system below which there are others, of the user's own."""


class Place(NamedTuple):
    """Where a task belongs; each is empty where the path does not say.

    `unit` is the innermost systemd unit whose CPUs can be set, `pod_uid` a Kubernetes pod's.
    """

    unit: str = ""
    pod_uid: str = ""


def place_of(cgroup: str) -> Place:
    """Return what the path of a cgroup says."""
    parts = [part for part in cgroup.split("/") if part]
    pods = [found[1].replace("_", "-") for part in parts if (found := _POD.search(part))]
    return Place(_unit(parts), pods[-1] if pods else "")


def _unit(parts: list[str]) -> str:
    """Return the innermost unit of the node's systemd: one in a container has units of its own."""
    unit = ""
    for part in parts:
        if not _UNIT.match(part):
            break
        unit = part
        if not part.endswith(".slice") and not _USER_MANAGER.match(part):
            break
    return unit


def container_of(part: str) -> str:
    """Return the id in the last part of a path: `cri-containerd-ID.scope`, `kata_ID`, `a:b:ID`."""
    name = part.removesuffix(".scope")
    if name != part:
        name = name.rpartition("-")[2]
    return name.rpartition(":")[2].removeprefix("kata_")
