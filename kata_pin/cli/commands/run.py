"""`kata-pin run`: the daemon in the foreground, as the systemd unit starts it."""

from __future__ import annotations

import click

from kata_pin.cli.options import Session, global_options


@click.command()
@global_options
@click.pass_obj
def run(session: Session) -> None:
    """Run the daemon in the foreground.

    SIGHUP reads the configuration again, SIGTERM stops; pins stay. See kata-pin unpin to give them
    back.
    """
    from kata_pin.config import load
    from kata_pin.daemon.service.app import serve

    serve(session.config, lambda: load(session.config_file), debug=session.debug)
