"""`kata-pin config`: the settings in force, a check of a file, a sample file."""

from __future__ import annotations

import click

from kata_pin.cli.options import Session, global_options
from kata_pin.cli.render import screen
from kata_pin.model.reports.settings import ConfigCheckDocument, ConfigDocument


@click.group()
def config() -> None:
    """Show or check a configuration, or print a sample file."""


@config.command()
@click.option("--changed", is_flag=True, help="Only settings that differ from their default.")
@global_options
@click.pass_obj
def show(session: Session, changed: bool) -> None:
    """Print all settings in force as a configuration file."""
    from kata_pin.config.table import as_data, as_yaml

    if session.json:
        screen.document(ConfigDocument(settings=as_data(session.config)))
    else:
        click.echo(as_yaml(session.config, changed_only=changed), nl=False)


@config.command()
@click.argument("file", required=False)
@global_options
@click.pass_obj
def check(session: Session, file: str | None) -> None:
    """Check a configuration file; exit status 78 if it is wrong.

    FILE defaults to the file of --config, else to /etc/kata-pin/config.yaml.
    """
    from kata_pin.config import DEFAULT_FILE, load

    chosen = file or session.config_file
    load(chosen)
    name = chosen or DEFAULT_FILE
    if session.json:
        screen.document(ConfigCheckDocument(file=name, ok=True))
    else:
        click.echo(f"{name}: ok")


@config.command()
def sample() -> None:
    """Print a sample file: every setting, explained and commented out."""
    from kata_pin.config.table import sample as text

    click.echo(text(), nl=False)
