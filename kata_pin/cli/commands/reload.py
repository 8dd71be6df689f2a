"""`kata-pin reload`: the daemon reads its configuration again, and says whether it could."""

from __future__ import annotations

import click

from kata_pin.cli.options import Session, global_options


@click.command()
@global_options
@click.pass_obj
def reload(session: Session) -> None:
    """Have the daemon read its configuration again.

    Exit status 1 if it refuses the file; the former settings stay in force. `systemctl reload
    kata-pin` runs this, so it fails then too.
    """
    session.provider.reload()
