"""Which runtimes may be sent updates that they did not ask for (NRI's UpdateContainers).

containerd took two locks in the wrong order there: an update that arrives during any event could
hang every pod operation of the node (containerd/containerd#13733). containerd/nri v0.12.1 takes one
of them no more (pkg/adaptation/adaptation.go, updateContainers); containerd has it since 2.4.0. Of
every other runtime nothing is known, so nothing is sent. Pure.
"""

from __future__ import annotations

import re
from typing import Final

from kata_pin.wire.nri.messages import Configuration

RUNTIME: Final = "containerd"
SAFE: Final = (2, 4, 0)
SAFE_NRI: Final = (0, 12, 1)

_VERSION: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?:([-+~.]).{0,80})?", re.ASCII)


def updates_problem(told: Configuration) -> str:
    """Return why a runtime may not be sent updates unasked, empty if it may; `told` by Configure.

    A version that cannot be read is not safe, nor is one before the first safe one's release.
    """
    if told.runtime != RUNTIME:
        return "only containerd is known to take updates unasked without harm"
    version = _parsed(told.version)
    if version is None:
        return "containerd's version is not understood"
    if version < (*SAFE, True):
        return f"containerd before {_text(SAFE)} can deadlock on updates unasked"
    nri = _parsed(told.nri)
    if nri is not None and nri < (*SAFE_NRI, True):
        return f"NRI before {_text(SAFE_NRI)} can deadlock on updates unasked"
    return ""


def _parsed(text: str) -> tuple[int, ...] | None:
    """Return a version's three numbers and whether it is the release, or later.

    Whatever stands behind the numbers is before it, but for build metadata (`+`).
    """
    match = _VERSION.fullmatch(text)
    if match is None:
        return None
    return (*(int(number) for number in match.group(1, 2, 3)), match[4] in {None, "+"})


def _text(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)
