"""`kata-pin run`: the daemon in the foreground, as the systemd unit starts it."""

from __future__ import annotations

import click

from kata_pin.cli.options import Session, global_options


@click.command()
@global_options
@click.pass_obj
def run(session: Session) -> None:
    """Run the daemon in the foreground.

    SIGHUP reloads the configuration. SIGTERM stops the daemon; all affinities are kept, and
    kata-pin unpin restores them.
    """
    from kata_pin.config import load
    from kata_pin.daemon.service.app import serve

    serve(session.config, lambda: load(session.config_file), debug=session.debug)
