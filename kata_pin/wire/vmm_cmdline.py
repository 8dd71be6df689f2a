"""Command lines of VMMs and of the processes around them: which sandbox, and what machine.

A command line is what the process shows, not what it is: it names a candidate, and D5 asks for a
witness beside it. QEMU's own syntax is in wire/qemu/cmdline.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.sandbox import GuestTopology
from kata_pin.wire.ids import is_id

MAX_ARGUMENTS: Final = 16_384

FIRECRACKER_ID: Final = 32
"""Kata gives firecracker the first 32 characters of a sandbox id (virtcontainers/fc.go)."""

_SEPARATORS: Final = re.compile(r"[/,=:]")
_BELOW_SANDBOX: Final = frozenset({"root", "run"})


@dataclass(frozen=True, slots=True)
class VmmCommand:
    """What a VMM's command line contains; only QEMU's has more than the sandbox.

    `sandbox_id` is empty when none is named; `id_length` is where it may be cut, None for nowhere.
    `guest.boot` is 0 where the number of vCPUs is unknown. `kvm` is False for TCG, `monitor` True
    where it has a QMP monitor. `problems` says what could not be read.
    """

    sandbox_id: str = ""
    id_length: int | None = None
    guest: GuestTopology = field(default_factory=GuestTopology)
    kvm: bool = True
    iothreads: tuple[str, ...] = ()
    guest_cid: int = 0
    kernel: str = ""
    monitor: bool = False
    problems: tuple[str, ...] = ()

    def names(self, sandbox_id: str) -> bool:
        """Return whether it names this sandbox."""
        return self.sandbox_id in {sandbox_id, sandbox_id[: self.id_length]}


def parse_cloud_hypervisor(argv: Sequence[str]) -> VmmCommand:
    """Read `--api-socket /run/vc/vm/<id>/clh-api.sock` (Go) or below /run/kata/<id>/root (rs)."""
    path, _, _ = _argument(argv, ("--api-socket",)).partition(",")
    return VmmCommand(_id_of_directory(path.removeprefix("path=")))


def parse_firecracker(argv: Sequence[str]) -> VmmCommand:
    """Read `--id <id>`, or else the directory of `--api-sock <path>`."""
    named = _argument(argv, ("--id",))
    path = _argument(argv, ("--api-sock",))
    found = named if is_id(named) else _id_of_directory(path)
    return VmmCommand(found, id_length=FIRECRACKER_ID)


def parse_shim(argv: Sequence[str]) -> VmmCommand:
    """Read `-id <sandbox>` of containerd-shim-kata-v2 (Go's flag package: one dash or two)."""
    named = _argument(argv, ("-id", "--id"))
    return VmmCommand(named if is_id(named) else "")


def names_sandbox(argv: Iterable[str], sandbox_id: str) -> bool:
    """Return whether an argument has `sandbox_id` as a whole element of a path or value.

    For virtiofsd and nydusd, whose arguments are paths below the sandbox's directories.
    """
    if not sandbox_id:
        return False
    return any(sandbox_id in arg and sandbox_id in _SEPARATORS.split(arg) for arg in argv)


def _argument(argv: Sequence[str], names: tuple[str, ...]) -> str:
    """Return the argument after the first of `names`, or after its `=`; empty when absent."""
    if len(argv) > MAX_ARGUMENTS:
        raise ParseError(f"more than {MAX_ARGUMENTS} arguments", source="cmdline")
    for position, arg in enumerate(argv):
        name, equals, value = arg.partition("=")
        if name in names:
            if equals:
                return value
            return argv[position + 1] if position + 1 < len(argv) else ""
    return ""


def _id_of_directory(path: str) -> str:
    """Return the sandbox whose directory holds a socket, at most `root/run` below it.

    Seen: /run/vc/vm/<id>/, /run/kata/<id>/root/, /run/kata/<id>/run/ and
    /run/vc/firecracker/<id>/root/run/.
    """
    parts = path.split("/")[:-1]
    while parts and parts[-1] in _BELOW_SANDBOX:
        parts.pop()
    return parts[-1] if parts and is_id(parts[-1]) else ""
