"""One pass over one sandbox: observe, decide, act, read back, report (DESIGN D1, D2).

The kernel is asked anew each time; what is held between passes is only what cannot change while a
thread lives (roles) or what makes the next look cheaper. No timers, no sockets, no tasks: the
daemon calls it from supervisors, the command line calls it once.

Lifetime: an Engine lives as long as its configuration, a Held as long as its sandbox.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from kata_pin.daemon.foreign import ForeignWatch
from kata_pin.daemon.nodefacts import NodeWatch
from kata_pin.errors import TaskGone, VmmError
from kata_pin.host.affinity import apply_all
from kata_pin.host.cpuset import CpusetReader
from kata_pin.host.process_index import ProcessIndex
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import list_tids, read_tasks
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node import Node
from kata_pin.model.placement import (
    Action,
    ActionResult,
    Drift,
    Note,
    NoteLevel,
    Outcome,
    Placement,
    Report,
)
from kata_pin.model.sandbox import Container, Sandbox, Vmm
from kata_pin.model.thread import Thread, ThreadKey, ThreadRole
from kata_pin.policy.drift import find_drift
from kata_pin.policy.place import place
from kata_pin.policy.plan import make_plan

log = logging.getLogger(__name__)

MAX_ROUNDS: Final = 5
"""Rounds of one pass: threads born meanwhile, or a cpuset that moved, need another look."""

_AGAIN: Final = frozenset({Outcome.CLIPPED, Outcome.REFUSED})


class Memory(Protocol):
    """What passes need to remember beyond a restart; the registry is one."""

    def pairs(self, sandbox_id: str) -> dict[ThreadKey, int]:
        """Return the pCPU of each paired vCPU thread."""

    def first_seen(self, sandbox_id: str) -> dict[ThreadRole, CpuSet]:
        """Return the affinity of each role before the first pin; empty when never pinned."""

    def keep(
        self,
        sandbox_id: str,
        *,
        pairs: Mapping[ThreadKey, int],
        first_seen: Mapping[ThreadRole, CpuSet],
    ) -> None:
        """Remember both, before any affinity is set."""
