"""`doctor` for guests: whether they are reachable, and what is known of their CPUs.

Pure but for one check of vsock.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Final

from kata_pin.cli.reports import remedies, words
from kata_pin.config import Config
from kata_pin.model.reports.doctor import Row
from kata_pin.model.reports.guest import Guest
from kata_pin.model.reports.state import State
from kata_pin.remedy import here

VHOST_VSOCK: Final = ("/dev/vhost-vsock", "/sys/devices/virtual/misc/vhost-vsock")
"""The host's device, and where a container without the host's devices sees it."""

_STATUS: Final = {
    "applied": "ok",
    "idle": "ok",
    "off": "info",
    "pending": "info",
    "denied": "warn",
    "unreachable": "warn",
    "failed": "warn",
}

_REMEDIES: Final = {
    "denied": "allow UpdateContainerRequest in the pod's policy",
    "unreachable": "kata-pin map shows what is known; guest.enabled: false turns the attempts off",
    "failed": "see kata-pin map, and kata-agent's log in the guest",
}

_UNAFFECTED: Final = "; guest cpusets are not applied, pinning on the host is unaffected"


def guests(
    state: State, config: Config, *, devices: tuple[str, ...] = VHOST_VSOCK
) -> Iterator[Row]:
    """Yield whether guests can be reached, then the rows of every sandbox."""
    yield reachable(config, devices)
    for sandbox in state.sandboxes:
        guest = sandbox.guest
        if guest is not None and guest.vcpus:
            yield from _sandbox(guest, words.owner(sandbox))


def reachable(config: Config, devices: tuple[str, ...]) -> Row:
    """Return whether this host supports vsock, which reaches QEMU's guests."""
    if not config.guest.enabled:
        return Row("guest", "info", "disabled by guest.enabled")
    problem = "" if any(map(os.path.exists, devices)) else f"{devices[0]} does not exist"
    try:
        socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    except OSError as error:
        problem = f"no vsock support in this kernel ({error.strerror})"
    if problem:
        text = f"{problem}: guests of QEMU are unreachable"
        return Row("guest", "warn", text, here(remedies.VSOCK))
    programs = "; guest.exec allows programs to run in guests" if config.guest.exec else ""
    return Row("guest", "ok", f"vsock: available{programs}")


def _sandbox(guest: Guest, name: str) -> Iterator[Row]:
    state = guest.state
    text = words.GUEST_STATES.get(state, state) + (f": {guest.detail}" if guest.detail else "")
    text += _UNAFFECTED if state in {"denied", "unreachable"} else ""
    yield Row("guest", _STATUS.get(state, "info"), text, _REMEDIES.get(state, ""), name)
    yield _numbers(guest, name)
    owned = any(one.container for one in guest.vcpus)
    for one in guest.containers:
        if owned and one.cpus is None:
            text = f"container {one.name} may run on any guest CPU: {one.reason}"
            yield Row("guest", "warn", text, "", name)


def _numbers(guest: Guest, name: str) -> Row:
    """Return how well the guest CPU of each vCPU is known."""
    counts: dict[str, int] = {}
    for one in guest.vcpus:
        counts[one.state] = counts.get(one.state, 0) + 1
    text = ", ".join(f"{count} {state}" for state, count in counts.items())
    if counts.keys() <= {"measured", "proven"}:
        return Row("guest CPUs", "ok", text, "", name)
    if not any(one.container for one in guest.vcpus):
        return Row("guest CPUs", "info", text, "", name)
    remedy = "guest.exec: true measures them; guest.act_on_inferred: true uses inferred ones"
    return Row("guest CPUs", "warn", text, remedy, name)
