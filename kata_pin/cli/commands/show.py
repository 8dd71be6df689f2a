"""`kata-pin show`."""

from __future__ import annotations

import time

import click

from kata_pin.cli.options import Session, complete_sandbox, global_options
from kata_pin.cli.render import screen


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@click.option("--cpus", is_flag=True, help="One row per pCPU, grouped by NUMA node and core.")
@click.option(
    "--watch",
    metavar="SECONDS",
    type=click.FloatRange(0.2, 3600),
    help="Refresh every SECONDS seconds until Ctrl-C.",
)
@global_options
@click.pass_obj
def show(session: Session, sandbox: str | None, cpus: bool, watch: float | None) -> None:
    """Show the sandboxes of this node, one of them, or its pCPUs.

    Without SANDBOX: one line per sandbox with its mask, the affinities of its vCPUs and of its
    overhead threads, its state and the age of the last check. `!` marks drift. With SANDBOX (an id
    or its start, a pod's name, or namespace/name): its containers, threads and network interfaces.
    """
    while True:
        if watch is not None:
            click.clear()
        _once(session, sandbox, cpus)
        if watch is None:
            return
        time.sleep(watch)


def _once(session: Session, name: str | None, cpus: bool) -> None:
    provider = session.provider
    state = provider.state(provider.chosen(name))
    if name is not None and not cpus:
        from kata_pin.cli.reports.network import with_network

        state = with_network(state)
    by = "cpus:cpus" if cpus else "show:overview" if name is None else "show:single"
    screen.report(state, json=session.json, by=by)
