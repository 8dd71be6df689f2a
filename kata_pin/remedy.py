"""What helps where kata-pin runs: a command on a node, another one or a chart's value in a pod.

`here` alone decides which. The kubelet sets KUBERNETES_SERVICE_HOST in every container that it
starts, and systemd, podman and shells of a node do not have it.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

_IN_POD: Final = "KUBERNETES_SERVICE_HOST"


class Remedy(NamedTuple):
    """One remedy: what helps on a node, and in a pod if that is something else.

    `value` is the chart's value that `pod` names, empty where it names none.
    """

    node: str
    pod: str = ""
    value: str = ""


def in_pod() -> bool:
    """Return whether this program runs in a container of Kubernetes."""
    return _IN_POD in os.environ


def here(remedy: Remedy, **names: object) -> str:
    """Return the remedy that fits; `names` are what its braces stand for."""
    text = remedy.pod if in_pod() and remedy.pod else remedy.node
    return text.format(**names)
