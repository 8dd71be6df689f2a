"""`kata-pin history`."""

from __future__ import annotations

import re
from typing import Final

import click

from kata_pin.cli.options import Session, complete_sandbox, global_options
from kata_pin.cli.render import screen

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN: Final = re.compile(r"([0-9]{1,6})([smhd])\Z")


def _seconds(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """Return the seconds of a time span."""
    if value is None:
        return None
    found = _SPAN.match(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a time span such as 90s, 15m, 2h or 1d")
    return int(found[1]) * _UNITS[found[2]]


@click.command()
@click.argument("sandbox", required=False, default="", shell_complete=complete_sandbox)
@click.option(
    "--since",
    metavar="SPAN",
    callback=_seconds,
    help="Only changes of the last SPAN, such as 90s, 15m, 2h or 1d.",
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=50,
    show_default=True,
    help="Only the newest N changes.",
)
@global_options
@click.pass_obj
def history(session: Session, sandbox: str, since: int | None, limit: int) -> None:
    """Show how sandboxes changed, when and why.

    One line per change, newest last: state, sandbox mask, threads moved, the events that triggered
    the pass, and the latency from the first event until every affinity was read back. SANDBOX is an
    id or its start, or a pod; all sandboxes of a recreated pod are shown. Ended sandboxes are kept
    until the limits in `history:` remove them.
    """
    document = session.provider.history(sandbox, since_s=since, limit=limit)
    screen.report(document, json=session.json, by="history:history")
