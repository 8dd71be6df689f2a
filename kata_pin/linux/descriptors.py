"""The network descriptors that a VMM has open."""

from __future__ import annotations

import os
from itertools import islice
from typing import Final

from msgspec import Struct

from kata_pin.linux.files import HostRoot, read_once, translated
from kata_pin.rights.broker.living import folder_of

MAX_DESCRIPTORS: Final = 65_536
"""A compromised VMM may open many: the call ends there."""

_TUN: Final = "/dev/net/tun"
_TAP: Final = "/dev/tap"  # and the index of a macvtap
_VHOST: Final = "/dev/vhost-"


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
        index = target.removeprefix(_TAP)
        if index != target and index.isdigit() and index.isascii() and len(index) <= 10:
            queues.append(int(index))
        elif target.startswith(_VHOST):
            vhosts.append(target.removeprefix("/dev/"))
    return Descriptors(tuple(queues), tuple(vhosts))


def interface_of_fdinfo(data: bytes) -> str:
    """Return the interface of a tun descriptor from its fdinfo, empty while it is attached to none.

    The line is `iff:` and a tab (drivers/net/tun.c, tun_chr_show_fdinfo).
    """
    lines = (line.partition(b"\t") for line in data.split(b"\n"))
    return next(
        (value.decode("utf-8", "backslashreplace") for key, _, value in lines if key == b"iff:"), ""
    )
