"""`kata-pin metrics`: what Prometheus would scrape."""

from __future__ import annotations

import click

from kata_pin.cli.options import Session, global_options
from kata_pin.cli.render import screen


@click.command()
@global_options
@click.pass_obj
def metrics(session: Session) -> None:
    """Print the daemon's metrics in Prometheus' text format.

    Read where the setting metrics.listen has them served; metrics.md in docs/ or
    /usr/share/doc/kata-pin describes each.
    """
    from kata_pin.cli.scrape import scrape

    document = scrape(session.config.metrics.listen, session.runtime_dir)
    if session.json:
        screen.document(document)
    else:
        click.echo(document.text, nl=False)
