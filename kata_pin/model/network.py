"""The network interfaces of a sandbox's VMM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VhostWorker:
    """A vhost worker that serves an interface; `inferred` where it was paired by number only."""

    tid: int
    inferred: bool


@dataclass(frozen=True, slots=True)
class Interface:
    """A link of the VMM's network namespace.

    `kind` is `tap`, `tun`, `veth`, `macvtap` or the kernel's name for another one, empty for a
    device. `queues` are those that the VMM has open, else those of the link. `peer` is the
    interface that its packets go to inside the namespace (tc redirect, or macvtap's lower device),
    empty for none. `attached` says whether the VMM has a descriptor of it.
    """

    name: str
    kind: str
    queues: int
    peer: str = ""
    attached: bool = False
    served_by: tuple[VhostWorker, ...] = ()
