"""The network descriptors that a VMM has open."""

from __future__ import annotations

import os
import re
from itertools import islice
from typing import Final

from msgspec import Struct

from kata_pin.linux.files import HostRoot, read_once, translated
from kata_pin.linux.proc import interface_of_fdinfo
from kata_pin.rights.broker.living import folder_of

MAX_DESCRIPTORS: Final = 65_536
"""A compromised VMM may open many: the call ends there."""

_TUN: Final = "/dev/net/tun"
_MACVTAP: Final = re.compile(r"/dev/tap([0-9]{1,10})\Z")
_VHOST: Final = re.compile(r"/dev/(vhost-[a-z]+)\Z")


class Descriptors(Struct, frozen=True):
    """What the VMM has open, by descriptor number.

    `queues` has one entry per queue of an interface: its name, or its index for macvtap. `vhosts`
    are the names of vhost devices.
    """

    queues: tuple[str | int, ...] = ()
    vhosts: tuple[str, ...] = ()


def read_descriptors(root: HostRoot, pid: int) -> Descriptors:
    """Return the network descriptors of a process; raises TaskGone."""
    queues: list[str | int] = []
    vhosts: list[str] = []
    process = folder_of(pid, root.proc())  # a first thread that has exited has none open
    try:
        numbers = sorted(map(int, islice(os.listdir(f"{process}/fd"), MAX_DESCRIPTORS)))
    except OSError as error:
        raise translated(error, "list descriptors of", f"process {pid}") from error
    for number in numbers:
        try:
            target = os.readlink(f"{process}/fd/{number}")
            if target == _TUN:
                name = interface_of_fdinfo(read_once(f"{process}/fdinfo/{number}"))
                queues += [name] if name else []
        except OSError:
            continue  # closed meanwhile
        if macvtap := _MACVTAP.match(target):
            queues.append(int(macvtap[1]))
        elif vhost := _VHOST.match(target):
            vhosts.append(vhost[1])
    return Descriptors(tuple(queues), tuple(vhosts))
