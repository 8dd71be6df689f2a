"""The map document: which pCPU is which vCPU and which guest CPU."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION
from kata_pin.model.reports.daemon import Daemon
from kata_pin.model.reports.guest import Guest


@dataclass(frozen=True, slots=True)
class MapSandbox:
    """The map of one sandbox."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    state: str  #: as in `state`
    guest: Guest | None  #: the map to guest CPUs; null: no VMM


@dataclass(frozen=True, slots=True, kw_only=True)
class MapDocument:
    """Printed by `map`."""

    version: int = VERSION  #: version of the document
    kind: str = "map"  #: kind of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon made it
    sandboxes: tuple[MapSandbox, ...]  #: one object per sandbox
