"""What a cgroup's path says of a task: its systemd unit, pod and container. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_POD: Final = re.compile(
    r"(?:^|[-/])pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
    r"|[0-9a-f]{32})(?:\.slice)?\Z"
)
_UNIT: Final = re.compile(r"[^/]+\.(?:service|scope|slice)\Z")


class Place(NamedTuple):
    """Where a task belongs; each is empty where the path does not say.

    `unit` is the innermost systemd unit whose CPUs can be set, `pod_uid` a Kubernetes pod's,
    `container` the last part without what runtimes put around an id.
    """

    unit: str = ""
    pod_uid: str = ""
    container: str = ""


def place_of(cgroup: str) -> Place:
    """Return what the path of a cgroup says."""
    parts = [part for part in cgroup.split("/") if part]
    units = [part for part in parts if _UNIT.match(part)]
    pods = [found[1].replace("_", "-") for part in parts if (found := _POD.search(part))]
    return Place(
        units[-1] if units else "",
        pods[-1] if pods else "",
        container_of(parts[-1]) if parts else "",
    )


def container_of(part: str) -> str:
    """Return the id in the last part of a path: `cri-containerd-ID.scope`, `kata_ID`, `a:b:ID`."""
    name = part.removesuffix(".scope")
    if name != part:
        name = name.rpartition("-")[2]
    return name.rpartition(":")[2].removeprefix("kata_")
