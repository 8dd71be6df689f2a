"""Command lines of VMMs and of the processes around them: which sandbox, and what machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec import Struct, field

from kata_pin.base.errors import ParseError
from kata_pin.base.json_text import is_id, load
from kata_pin.base.sandbox import GuestTopology

# A command line is what the process shows, not what it is: it names a candidate, and D5 asks for a
# witness beside it. QEMU's own syntax is in peers/qemu.py.

MAX_ARGUMENTS: Final = 16_384

FIRECRACKER_ID: Final = 32
"""Kata gives firecracker the first 32 characters of a sandbox id (virtcontainers/fc.go)."""

_SEPARATORS: Final = re.compile(r"[/,=:]")
_BELOW_SANDBOX: Final = frozenset({"root", "run"})


class VmmCommand(Struct, frozen=True):
    """What a VMM's command line contains; only QEMU's has more than the sandbox.

    `sandbox_id` is empty when none is named; `id_length` is where it may be cut, None for nowhere.
    `guest.boot` is 0 where the number of vCPUs is unknown. `kvm` is False for TCG, `monitor` True
    where it has a QMP monitor, `loads` where it loads a state instead of booting a guest.
    `problems` says what could not be read.
    """

    sandbox_id: str = ""
    id_length: int | None = None
    guest: GuestTopology = field(default_factory=GuestTopology)
    kvm: bool = True
    iothreads: tuple[str, ...] = ()
    guest_cid: int = 0
    kernel: str = ""
    monitor: bool = False
    loads: bool = False
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


def parse_openvmm(argv: Sequence[str]) -> VmmCommand:
    """Read `--ttrpc /run/kata/<id>/openvmm.sock`, all that runtime-rs gives it."""
    return VmmCommand(_id_of_directory(_argument(argv, ("--ttrpc",))))


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


# QEMU's command line as options: which argument belongs to which, and `key=value` lists.
#
# Syntax only (qemu(1), util/qemu-option.c): one or two dashes, a comma inside a value is doubled,
# the first element may stand without its key, and -object and -device also take JSON. What the
# options mean is in peers/qemu.py. The line is under the control of the process that
# shows it.

MAX_PROPERTIES: Final = 4096

Properties = dict[str, list[str]]
"""Every value of each key, in order: some keys are repeated on purpose (-numa cpus=)."""

# Options of qemu-system-* without an argument (qemu-options.hx, 4.0 to 10.x). All others take one.
_BARE: Final = frozenset(
    """
    h help version S s snapshot enable-kvm enable-fips nodefaults no-user-config nodefconfig
    nographic curses full-screen alt-grab ctrl-grab no-quit no-frame portrait sdl usb no-reboot
    no-shutdown no-acpi no-hpet no-fd-bootchk win2k-hack rtc-td-hack singlestep one-insn-per-tb
    daemonize mem-prealloc preconfig only-migratable old-param semihosting xen-attach
    xen-domid-restrict async-teardown prom-env-help no-kvm no-kvm-irqchip
    """.split()  # noqa: SIM905 - a list of 45 lines reads worse
)


def options(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (option name without dashes, its argument or an empty text), program name left out.

    Walked as QEMU does, so that an argument that looks like an option (`-append -name`) is none.
    ParseError for more than MAX_ARGUMENTS arguments.
    """
    if len(argv) > MAX_ARGUMENTS:
        raise ParseError(f"more than {MAX_ARGUMENTS} arguments", source="cmdline")
    position = 1
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("-") or word == "-":
            continue  # a disk image, or padding after the last argument
        name = word[2:] if word.startswith("--") else word[1:]
        if name in _BARE:
            yield name, ""
        else:
            yield name, argv[position] if position < len(argv) else ""
            position += 1


def properties(value: str, *, first: str = "") -> Properties:
    """Split `a=1,b=2`; a first element without `=` is the value of `first`, or a bare key.

    A later element without `=` is a switch: `no<key>` reads `off`, any other `on`, as QEMU did.
    ParseError for more than MAX_PROPERTIES elements.
    """
    if value.startswith("{"):
        return _json_properties(value)
    if value.count(",") > MAX_PROPERTIES:
        raise ParseError(f"more than {MAX_PROPERTIES} properties", source="cmdline", text=value)
    found: Properties = {}
    for number, element in enumerate(_split_commas(value)):
        key, equals, text = element.partition("=")
        if not equals:
            if number == 0 and first:
                key, text = first, element
            elif key.startswith("no") and len(key) > 2:
                key, text = key[2:], "off"
            else:
                text = "on"
        found.setdefault(key, []).append(text)
    return found


def last(found: Properties, key: str) -> str:
    """Return the value that counts when a key is repeated: the last; empty when absent."""
    return found[key][-1] if key in found else ""


def number(text: str, *, source: str, high: int, low: int = 0) -> int:
    """Return a decimal number within low..high; the text is bounded before it is converted."""
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise ParseError("not a number", source=source, text=text)
    value = int(text)
    if not low <= value <= high:
        raise ParseError(f"not within {low} to {high}", source=source, text=text)
    return value


def _split_commas(value: str) -> list[str]:
    return [part.replace("\0", ",") for part in value.replace(",,", "\0").split(",")]


def _json_properties(value: str) -> Properties:
    document = load(value.encode(), source="cmdline", limit=64 * 1024)
    found: Properties = {}
    if isinstance(document, dict):
        for key, item in document.items():
            texts = item if isinstance(item, list) else [item]
            found[key] = [_scalar(text) for text in texts]
    return found


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if isinstance(value, int | str) else ""
