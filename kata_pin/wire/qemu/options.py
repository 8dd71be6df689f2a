"""QEMU's command line as options: which argument belongs to which, and `key=value` lists.

Syntax only (qemu(1), util/qemu-option.c): one or two dashes, a comma inside a value is doubled, the
first element may stand without its key, and -object and -device also take JSON. What the options
mean is read in `cmdline` and `smp`. The line is under the control of the process that shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.wire.json_text import load
from kata_pin.wire.vmm_cmdline import MAX_ARGUMENTS

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
