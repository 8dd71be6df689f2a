"""Network queues whose packets are handled by chosen pCPUs: RPS and XPS.

Facts: Documentation/networking/scaling.rst. Devices of this network namespace only. A queue
without XPS has a file that cannot be read (ENOENT), and an empty mask means off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Final

from kata_pin.host.quiet.reading import mask, unreadable
from kata_pin.host.root import HostRoot
from kata_pin.model.quiet.node import Queue, Unknown

MAX_QUEUES: Final = 8192
"""Most queues that are read: 64 of a network card, and 2 per veth of 1,000 pods."""

_FILES: Final = {"rx-": ("rps", "rps_cpus"), "tx-": ("xps", "xps_cpus")}


def device_names(root: HostRoot) -> list[str]:
    """Return the network devices by name; never raises."""
    try:
        return sorted(os.listdir(root.sys("class/net")))
    except OSError:
        return []


def read_queues(root: HostRoot) -> tuple[Queue, ...] | Unknown:
    """Return the queues that have a mask, which may be empty; never raises."""
    base = root.sys("class/net")
    try:
        devices = sorted(os.listdir(base))
    except OSError as error:
        return unreadable(base, error)
    found = []
    for device, name in islice(_names(base, devices), MAX_QUEUES):
        kind, file = _FILES[name[:3]]
        cpus = mask(f"{base}/{device}/queues/{name}/{file}")
        if isinstance(cpus, Unknown) and not cpus.absent:
            return cpus
        if not isinstance(cpus, Unknown):
            found.append(Queue(device, name, kind, cpus))
    return tuple(found)


def _names(base: str, devices: list[str]) -> Iterator[tuple[str, str]]:
    for device in devices:
        try:
            names = sorted(os.listdir(f"{base}/{device}/queues"))
        except OSError:  # it was removed, or is no device (bonding_masters)
            continue
        yield from ((device, name) for name in names if name[:3] in _FILES)
