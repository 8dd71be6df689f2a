"""`kata-pin config`: the settings in force, a check of a file, a sample file."""

from __future__ import annotations

import click

from kata_pin.base.documents.answers import ConfigCheckDocument, ConfigDocument
from kata_pin.cli.options import CommandGroup, Session, global_options
from kata_pin.cli.render import screen
from kata_pin.cli.reports.words import safe


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
    from kata_pin.service.configuration import from_data

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
    from kata_pin.base.errors import ConfigError
    from kata_pin.cli.quick import COMMANDS
    from kata_pin.cli.reports.config_check import problems_of
    from kata_pin.service.configuration import DEFAULT_FILE

    if file == "":
        raise click.BadParameter("names no file", param_hint="FILE")
    name = file or session.config_file or DEFAULT_FILE
    needed = bool(file or session.config_file)
    found = problems_of(name, needed=needed, file_only=file_only, commands=COMMANDS)
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
