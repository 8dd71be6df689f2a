"""`kata-pin release` and `release-nodes`: restore affinities before kata-pin is removed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from kata_pin.cli.commands.reporter import api_options, in_cluster
from kata_pin.cli.options import Session, global_options, time_span

if TYPE_CHECKING:
    from kata_pin.model.reports.applied import Applied

AGAIN_S: Final = 1.0
"""Wait between two attempts to ask a daemon that only starts."""


@click.command()
@click.option(
    "--wait",
    "wait_s",
    metavar="SPAN",
    callback=time_span,
    default="30s",
    show_default=True,
    help="Longest wait for a daemon that only starts.",
)
@global_options
@click.pass_obj
def release(session: Session, wait_s: int) -> None:
    """Have the daemon restore all affinities, and set none until it is restarted.

    What `uninstall` does on a node, without removing a file: for pods, whose files go with the
    image. Needs root. Unlike `unpin` it is not remembered.
    """
    from kata_pin.cli.commands.install import release_pins
    from kata_pin.sources.daemon_socket import DaemonAway, DaemonSilent

    def nobody(_config: object) -> Applied:
        raise DaemonAway("no daemon is running", hint="without one: kata-pin unpin")

    deadline = time.monotonic() + wait_s
    while True:
        try:
            remark = release_pins(session.config, nobody)
        except (DaemonAway, DaemonSilent):
            if time.monotonic() + AGAIN_S > deadline:
                raise
            time.sleep(AGAIN_S)
        else:
            click.echo(remark)
            return


@click.command()
@click.argument("daemonset", metavar="NAMESPACE/DAEMONSET")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SPAN",
    callback=time_span,
    default="10m",
    show_default=True,
    help="Longest wait for all nodes.",
)
@api_options()
def release_nodes(daemonset: str, *, timeout_s: int, api: str | None, token: str, ca: str) -> None:
    """Restore affinities on every node of a cluster.

    Rolls the DaemonSet out once more, with a step in which each node's daemon runs `kata-pin
    release`, and waits until all pods are ready. Run by the chart before it is uninstalled.
    """
    import asyncio

    from kata_pin.reporter.undo import Rollout
    from kata_pin.sources.http_client import HttpClient
    from kata_pin.wire.kube.objects import MAX_ANSWER, is_object_name

    namespace, _, name = daemonset.partition("/")
    if not is_object_name(namespace) or not is_object_name(name):
        raise click.BadParameter("expected NAMESPACE/DAEMONSET", param_hint="DAEMONSET")
    client = HttpClient(api or in_cluster(), token=token, ca=ca, most=MAX_ANSWER)
    rollout = Rollout(client, namespace, name, click.echo)
    asyncio.run(rollout.release(timeout_s))
