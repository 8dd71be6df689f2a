"""What is wrong with a configuration on this node: CPUs, policies, groups, files it does not have.

Only settings that the file sets are checked against the node, except the policy, which needs all of
`alloc`. Paths below /run are made by their owners at run time, so they may be missing. Errors of
the file alone: service/configuration.py.
"""

from __future__ import annotations

import glob
import grp
import os
import stat
from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import Final

from kata_pin.base.config.options import OPTIONS, Option, announced, function_of, known
from kata_pin.base.config.tree import Config
from kata_pin.base.cpuset import CpuSet, HostTopology
from kata_pin.base.documents.answers import ConfigProblem
from kata_pin.base.errors import ConfigError, reason_of
from kata_pin.base.values import here
from kata_pin.cli.reports.words import NOT_MOUNTED
from kata_pin.linux.files import HostRoot
from kata_pin.linux.topology import read_topology
from kata_pin.service.configuration import FileReading, read, read_text

CPU_LISTS: Final = ("housekeeping", "alloc.cpus", "alloc.reserved", "alloc.housekeeping")
PROGRAMS: Final = ("hypervisors", "shims")
FILES: Final = ("alloc.pods_token", "alloc.pods_certificate", "alloc.pods_ca")
FOLDERS: Final = ("paths.debugfs", "paths.bundle_roots", "paths.kata_configs")


def problems_of(
    file: str, *, needed: bool, file_only: bool, commands: Collection[str] = ()
) -> tuple[ConfigProblem, ...]:
    """Return every error of a file, in the order of its lines; `file_only`: not those of the node.

    `commands` are kata-pin's own, which no option of another package can have. A file that is not
    `needed` may be missing. Raises ConfigError for one that cannot be read, HostError or ParseError
    for a node that cannot.
    """
    try:
        reading = read(read_text(file))
    except FileNotFoundError as error:
        if needed:
            raise ConfigError("no such file", file=file) from error
        reading = FileReading(Config())
    errors = [*reading.errors, *_commands(reading.config, commands)]
    if not file_only:
        errors += node_errors(reading, read_topology(HostRoot()))
    problems = (_problem(error, reading) for error in errors)
    return tuple(sorted(problems, key=lambda one: one.line or 0))


def _commands(config: Config, commands: Collection[str]) -> Iterator[ConfigError]:
    """Yield that a command of another package's option cannot be run: kata-pin has one so named."""
    for name in config.added:
        option = announced(name)
        for command in option.commands if option else ():
            if command in commands:
                yield ConfigError(f"its command {command} is one of kata-pin's own", key=name)


def _problem(error: ConfigError, reading: FileReading) -> ConfigProblem:
    message = error.message.removeprefix(f"{error.key}: ")
    return ConfigProblem(error.key, reading.line_of(error.key) or None, message, error.hint)


def node_errors(reading: FileReading, topology: HostTopology) -> Iterator[ConfigError]:
    """Yield what a configuration names and a node does not have, each with its key."""
    config, given = reading.config, frozenset(reading.lines)
    yield from _cpus(config, topology.present)
    for option in known(config):
        if option.config_check:
            yield from _of_option(option, config, topology)
    if "group" in given and not _is_group(config.group):
        yield ConfigError(
            f"no such group: {config.group}",
            key="group",
            hint="`kata-pin install` and systemd-sysusers make it",
        )
    for key in PROGRAMS:
        for number, path in enumerate(attrgetter(key)(config) if key in given else ()):
            found = glob.glob(path)
            if not any(os.access(one, os.X_OK) and not os.path.isdir(one) for one in found):
                hint = here(NOT_MOUNTED)
                error = f"not an executable file: {path}"
                yield ConfigError(error, key=f"{key}.{number}", hint=hint)
    for key in (*FILES, *FOLDERS):
        if key in given:
            yield from _paths(key, attrgetter(key)(config))


def _of_option(option: Option, config: Config, topology: HostTopology) -> Iterator[ConfigError]:
    """Yield what is wrong with an option's settings; of another package's also that it fails."""
    try:
        yield from function_of(option.config_check)(config, topology)
    except Exception as error:
        if option in OPTIONS:
            raise
        yield ConfigError(f"its check could not run: {reason_of(error)}", key=option.name)


def _cpus(config: Config, present: CpuSet) -> Iterator[ConfigError]:
    lists = {key: attrgetter(key)(config) for key in CPU_LISTS}
    lists["overhead"] = config.overhead.cpus
    lists |= {f"overhead_roles.{role}": one.cpus for role, one in config.overhead_roles.items()}
    for key, cpus in lists.items():
        if missing := cpus - present:
            yield ConfigError(f"the node has no CPU {missing}; it has {present}", key=key)


def _is_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _paths(key: str, value: str | tuple[str, ...]) -> Iterator[ConfigError]:
    """Yield the paths that are missing, or are no file or folder."""
    wanted = stat.S_ISREG if key in FILES else stat.S_ISDIR
    paths = (value,) if isinstance(value, str) else value
    for number, path in enumerate(paths):
        if not path or path.startswith("/run/"):
            continue
        place = key if isinstance(value, str) else f"{key}.{number}"
        try:
            if not wanted(os.stat(path).st_mode):
                kind = "file" if key in FILES else "folder"
                yield ConfigError(f"not a {kind}: {path}", key=place)
        except OSError as error:
            yield ConfigError(reason_of(error), key=place)
