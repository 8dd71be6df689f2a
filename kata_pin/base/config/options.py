"""Options: what a node may want beside pins; a row each, and the rows of other packages.

A row is text and types: nothing of an option is imported to know it. Another package announces its
row as an entry point of GROUP that has the option's name. The name is a section of the
configuration, and only where the file has that section is the row looked for: without it no daemon
and no command scans entry points at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field

from kata_pin.base.errors import ConfigError, reason_of
from kata_pin.base.settings import MemoryMode

if TYPE_CHECKING:
    from kata_pin.base.config.tree import Config
    from kata_pin.base.documents.check import FindingRow

GROUP: Final = "kata_pin.options"
"""The entry points by which other packages announce options."""


class Option(Struct, frozen=True):
    """A row of the table.

    `module` has `start(core) -> Running` (service/options.py); `wanted` says whether settings
    switch it on; `table` is where it keeps what is to be restored, empty if it restores nothing;
    `places`: it has a say in where threads belong, also for commands without a daemon.

    What commands ask is the name of a function ("package.module:function"), which is imported then.
    `doctor` yields rows of what it is given (Examined, cli/doctor/node.py), `config_check` what is
    wrong with its settings on a node (Config and HostTopology; yields ConfigError).

    The rest is for options of other packages, since ours are in the tables of the core: the class
    of its section, whose fields are made by `setting`, its kinds of findings of `check`, and its
    commands: a name, the module and the click command in it ("package.module:command").
    """

    name: str
    module: str
    wanted: Callable[[Config], bool]
    table: str = ""
    places: bool = False
    doctor: str = ""
    config_check: str = ""
    settings: type[Struct] = Struct
    findings: tuple[FindingRow, ...] = ()
    commands: Mapping[str, str] = field(default_factory=dict)


OPTIONS: Final = (
    Option(
        "allocation",
        "kata_pin.options.allocation.option",
        lambda config: config.alloc.on,
        "alloc",
        places=True,
        config_check="kata_pin.options.allocation.checked_policy:problems",
    ),
    Option(
        "caches",
        "kata_pin.options.caches",
        lambda config: config.resctrl.enabled,
        "cache_groups",
    ),
    Option(
        "realtime",
        "kata_pin.options.realtime",
        lambda config: config.rt.priority > 0,
        "rt_threads",
    ),
    Option(
        "memory",
        "kata_pin.options.memory.keeper",
        lambda config: config.memory is MemoryMode.MIGRATE,
        doctor="kata_pin.options.memory.report:prerequisites",
    ),
    Option(
        "quiet",
        "kata_pin.options.quiet.keeper",
        lambda config: config.quiet.acts,
        "tunables",
        doctor="kata_pin.options.quiet.disturbance:prerequisites",
    ),
    Option(
        "isolation",
        "kata_pin.options.isolation.watch",
        lambda config: config.isolation.watch,
    ),
)


def known(config: Config) -> Iterator[Option]:
    """Yield our options, and those of other packages whose section the configuration has.

    Raises ConfigError.
    """
    yield from OPTIONS
    yield from filter(None, map(announced, config.added))


def function_of(place: str) -> Callable[..., Any]:
    """Import the function that a row names ("package.module:function"), and return it."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def announced(name: str) -> Option | None:
    """Return the option that another package announces by this name, None if none does.

    Raises ConfigError if it cannot be loaded, or if several do.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - 20 ms that few need

    found = tuple(entry_points(group=GROUP, name=name))
    if not found:
        return None
    if any(row.name == name for row in OPTIONS):
        raise ConfigError("kata-pin has an option of this name itself", key=name)
    entry, *others = found
    if others:
        packages = " and ".join(one.dist.name if one.dist else one.value for one in found)
        raise ConfigError(f"the packages {packages} both have an option of this name", key=name)
    try:
        option: object = entry.load()
    except Exception as error:
        raise ConfigError(
            f"the option cannot be loaded from {entry.value}: {reason_of(error)}", key=name
        ) from error
    if not isinstance(option, Option) or option.name != name:
        raise ConfigError(f"{entry.value} is no option of this name", key=name)
    return option


def command_of(name: str) -> str:
    """Return the module and the click command of another package's command; empty: there is none.

    An option that cannot be loaded has no commands. Raises ConfigError if two have this one.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - 20 ms that few need

    found: dict[str, str] = {}
    for option_name in sorted(entry_points(group=GROUP).names):
        with suppress(ConfigError):
            option = announced(option_name)
            if option is not None and name in option.commands:
                found[option_name] = option.commands[name]
    if len(found) > 1:
        raise ConfigError(f"the options {' and '.join(found)} both have the command {name}")
    return next(iter(found.values()), "")
