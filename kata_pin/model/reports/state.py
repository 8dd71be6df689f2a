"""The state document: the node, its sandboxes and the allocator; and the sandboxes' names."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION
from kata_pin.model.reports.daemon import Daemon
from kata_pin.model.reports.node import Node
from kata_pin.model.reports.note import Note
from kata_pin.model.reports.pools import Allocation
from kata_pin.model.reports.sandbox import Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Printed by `show`; with a sandbox named, `sandboxes` holds only that one."""

    version: int = VERSION  #: version of the document
    kind: str = "state"  #: kind of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon made it
    node: Node  #: the node
    sandboxes: tuple[Sandbox, ...]  #: one object per sandbox
    allocation: Allocation | None  #: kata-pin's allocator; null: `alloc.policy` is `none`
    notes: tuple[Note, ...]  #: what the operator should know about the node
