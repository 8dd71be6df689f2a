"""`kata-pin config`: the settings in force, a check of a file, a sample file."""

from __future__ import annotations

import glob
import grp
import os
import stat
from collections.abc import Iterator
from operator import attrgetter
from typing import Final

import click

from kata_pin.base.config.options import OPTIONS, Option, announced, function_of, known
from kata_pin.base.config.tree import Config
from kata_pin.base.cpuset import CpuSet, HostTopology
from kata_pin.base.documents.answers import ConfigCheckDocument, ConfigDocument, ConfigProblem
from kata_pin.base.errors import ConfigError, reason_of
from kata_pin.base.values import here
from kata_pin.cli.options import CommandGroup, global_options
from kata_pin.cli.quick import COMMANDS
from kata_pin.cli.render import screen
from kata_pin.cli.reports.words import NOT_MOUNTED, safe
from kata_pin.cli.session import Session
from kata_pin.service.configuration import DEFAULT_FILE, FileReading, from_data, read, read_text


@click.group(cls=CommandGroup)
def config() -> None:
    """Show or check a configuration, or print a sample file."""


@config.command()
@click.option("--changed", is_flag=True, help="Only settings that differ from their default.")
@click.option("--running", is_flag=True, help="Settings of the running daemon, not of the file.")
@global_options
@click.pass_obj
def show(session: Session, changed: bool, running: bool) -> None:
    """Print all settings as a configuration file.

    With --running those that the daemon has in force; a reload that it refused is named first.
    """
    from kata_pin.base.config.table import as_data, as_yaml

    if running:
        document = session.connect().daemons(ConfigDocument, "config")
        config = from_data(document.settings)
    else:
        config = session.config
        document = ConfigDocument(settings=as_data(config), running=False, refused=None)
    if session.json:
        screen.document(document)
        return
    if document.refused is not None:
        text = safe(f"reload refused at {document.refused.time}: {document.refused.error}")
        click.echo(f"# {text}")
    click.echo(as_yaml(config, changed_only=changed), nl=False)


@config.command()
@click.argument("file", required=False)
@click.option("--file-only", is_flag=True, help="Do not compare the file with this node.")
@global_options
@click.pass_obj
def check(session: Session, file: str | None, file_only: bool) -> int:
    """Check a configuration file; exit status 78 if it is wrong.

    FILE defaults to the file of --config, else to /etc/kata-pin/config.yaml. Reports all errors: of
    the file, and CPUs, policies, groups and paths that this node does not have.
    """
    if file == "":
        raise click.BadParameter("names no file", param_hint="FILE")
    name = file or session.config_file or DEFAULT_FILE
    needed = bool(file or session.config_file)
    found = _problems_of(name, needed=needed, file_only=file_only)
    if session.json:
        screen.document(ConfigCheckDocument(file=name, ok=not found, problems=found))
    elif not found:
        click.echo(f"{name}: ok")
    for one in found:
        place = f"line {one.line}: {one.key}" if one.line and one.key else one.key
        screen.failure(ConfigError(one.error, file=name, key=place, hint=one.hint))
    return ConfigError.exit_code if found else 0


@config.command()
def sample() -> None:
    """Print a sample file: every setting, explained and commented out."""
    from kata_pin.base.config.table import sample as text

    click.echo(text(), nl=False)


# What is wrong with a configuration on this node: CPUs, policies, groups, files it does not have.
#
# Only settings that the file sets are checked against the node, except the policy, which needs all
# of `alloc`. Paths below /run are made by their owners at run time, so they may be missing. Errors
# of the file alone: service/configuration.py.

CPU_LISTS: Final = ("housekeeping", "alloc.cpus", "alloc.reserved", "alloc.housekeeping")
PROGRAMS: Final = ("hypervisors", "shims")
FILES: Final = ("alloc.pods_token", "alloc.pods_certificate", "alloc.pods_ca")
FOLDERS: Final = ("paths.debugfs", "paths.bundle_roots", "paths.kata_configs")


def _problems_of(file: str, *, needed: bool, file_only: bool) -> tuple[ConfigProblem, ...]:
    """Return every error of a file, in the order of its lines; `file_only`: not those of the node.

    A file that is not `needed` may be missing. Raises ConfigError for one that cannot be read,
    HostError or ParseError for a node that cannot.
    """
    try:
        reading = read(read_text(file))
    except FileNotFoundError as error:
        if needed:
            raise ConfigError("no such file", file=file) from error
        reading = FileReading(Config())
    errors = [*reading.errors, *_commands(reading.config)]
    if not file_only:
        from kata_pin.linux.files import HostRoot
        from kata_pin.linux.topology import read_topology

        errors += node_errors(reading, read_topology(HostRoot()))
    problems = (_problem(error, reading) for error in errors)
    return tuple(sorted(problems, key=lambda one: one.line or 0))


def _commands(config: Config) -> Iterator[ConfigError]:
    """Yield that a command of another package's option cannot be run: kata-pin has one so named."""
    for name in config.added:
        option = announced(name)
        for command in option.commands if option else ():
            if command in COMMANDS:
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
