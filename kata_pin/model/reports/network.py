"""The network interfaces of a sandbox's VMM, and which vhost workers serve them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VhostWorker:
    """A vhost worker that serves an interface."""

    tid: int  #: thread id
    inferred: bool  #: paired by number only


@dataclass(frozen=True, slots=True)
class Interface:
    """A link of the VMM's network namespace."""

    name: str  #: its name
    kind: str  #: `tap`, `tun`, `veth`, `macvtap` or the kernel's name for another; empty: a device
    queues: int  #: queues that the VMM has open, else those of the link
    #: interface that receives its packets in the namespace (tc redirect, or macvtap's lower
    #: device); empty: none
    peer: str = ""
    attached: bool = False  #: whether the VMM has it open
    served_by: tuple[VhostWorker, ...] = ()  #: vhost workers of its queues


@dataclass(frozen=True, slots=True)
class Network:
    """The interfaces of a sandbox's VMM."""

    interfaces: tuple[Interface, ...] = ()  #: by index
    problem: str = ""  #: why they cannot be read
