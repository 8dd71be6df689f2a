"""Which runtimes may be sent unsolicited updates (NRI's UpdateContainers).

containerd took two locks in the wrong order: such an update during any event could hang every pod
operation of the node (containerd/containerd#13733). containerd/nri v0.12.1 no longer takes one of
them (pkg/adaptation/adaptation.go, updateContainers); containerd has it since 2.4.0. Other runtimes
are not known to be safe, so they get none.
"""

from __future__ import annotations

import re
from typing import Final

from kata_pin.wire.nri.messages import Configuration

RUNTIME: Final = "containerd"
SAFE: Final = (2, 4, 0)
SAFE_NRI: Final = (0, 12, 1)

_VERSION: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?:([-+~.]).{0,80})?", re.ASCII)


def updates_problem(runtime: Configuration) -> str:
    """Return why a runtime may not be sent unsolicited updates, empty if it may.

    An unreadable version is not safe, nor is a pre-release of the first safe one.
    """
    if runtime.runtime != RUNTIME:
        return "only containerd is known to handle unsolicited updates safely"
    version = _parsed(runtime.version)
    if version is None:
        return "cannot read containerd's version"
    if version < (*SAFE, True):
        return f"containerd before {_text(SAFE)} can deadlock on unsolicited updates"
    nri = _parsed(runtime.nri)
    if nri is not None and nri < (*SAFE_NRI, True):
        return f"NRI before {_text(SAFE_NRI)} can deadlock on unsolicited updates"
    return ""


def _parsed(text: str) -> tuple[int, ...] | None:
    """Return a version's three numbers, and whether it is the release itself.

    A suffix makes it a pre-release, except for build metadata (`+`).
    """
    match = _VERSION.fullmatch(text)
    if match is None:
        return None
    return (*(int(number) for number in match.group(1, 2, 3)), match[4] in {None, "+"})


def _text(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)
