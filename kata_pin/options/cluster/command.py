"""`kata-pin reporter`, which shows this node to a cluster, and `release-nodes`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from kata_pin.cli.options import global_options, time_span
from kata_pin.cli.render import screen
from kata_pin.cli.session import Session

F = TypeVar("F", bound=Callable[..., Any])

SECRETS: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes puts a pod's token and the API server's certificate authority."""


def api_options(also: str = "") -> Callable[[F], F]:
    """Return what adds --api, --token and --ca to a command; `also` is more help of --api."""
    options = (
        click.option(
            "--api",
            metavar="URL",
            help=f"API server{also}.  [default: the one of the pod's environment]",
        ),
        click.option(
            "--token",
            metavar="FILE",
            default=f"{SECRETS}/token",
            show_default=True,
            help="Token for the API server; read for each request, so it can be renewed.",
        ),
        click.option(
            "--ca",
            metavar="FILE",
            default=f"{SECRETS}/ca.crt",
            show_default=True,
            help="Certificate authority of the API server.",
        ),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _address(ctx: click.Context, param: click.Parameter, text: str) -> tuple[str, int]:
    """Read an address with its port; raises BadParameter."""
    from ipaddress import ip_address

    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        ip_address(host)
        number = int(port)
    except ValueError as error:
        wanted = "expected an IP address and a port, such as 127.0.0.1:9110"
        raise click.BadParameter(wanted, ctx, param) from error
    if not colon or not 0 <= number <= 65535:
        raise click.BadParameter("expected a port from 0 to 65535", ctx, param)
    return host, number


@click.command()
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    default="127.0.0.1:9110",
    show_default=True,
    callback=_address,
    help="Address of /healthz, /readyz, /livez and /metrics.",
)
@click.option(
    "--node",
    metavar="NAME",
    envvar="NODE_NAME",
    help="Name of this node in the cluster.  [default: $NODE_NAME, else the token's]",
)
@click.option(
    "--startup-taint",
    metavar="KEY",
    help="Taint of the node to remove once the daemon serves.  [default: none]",
)
@click.option(
    "--node-resource-topology",
    "topology",
    is_flag=True,
    help="Also publish the free pCPUs of kata-pin's allocator as a NodeResourceTopology.",
)
@api_options(also="; `none` writes nothing")
@global_options
@click.pass_obj
def reporter(
    session: Session,
    *,
    listen: tuple[str, int],
    node: str | None,
    startup_taint: str | None,
    topology: bool,
    api: str | None,
    token: str,
    ca: str,
) -> None:
    """Show this node to its cluster, and serve probes and metrics.

    Reads the daemon's status socket, and needs no rights on the node but the daemon's group. Writes
    the node's NodePlacement object when it changes, at most every 10 s, and Events on pods whose
    exclusive pCPUs are shared or disturbed, or were refused. Runs beside the daemon in the pods of
    hooks/charts/kata-pin.
    """
    from kata_pin.base.errors import KataPinError
    from kata_pin.options.cluster.api import ApiServer
    from kata_pin.options.cluster.publisher import (
        NodeDaemon,
        Publisher,
        Reporter,
        StartupTaint,
        Topology,
        serve,
    )
    from kata_pin.options.cluster.values import MAX_ANSWER, is_object_name
    from kata_pin.peers.http import Hints, HttpClient

    url = api or in_cluster()
    hints = Hints("name the API server's authority with --ca", "name the API server in --api")
    client = HttpClient(url, token=token, ca=ca, most=MAX_ANSWER, hints=hints, thread="api server")
    server = ApiServer(client)
    claims = server.claims()
    name = node or claims.node
    if not is_object_name(name):
        raise KataPinError(f"not the name of a node: {name!r}", hint="set --node or NODE_NAME")
    if claims.node and claims.node != name:
        raise KataPinError(
            f"the token is for node {claims.node}, not for {name}",
            hint="set --node or NODE_NAME to the name of the node that the pod runs on",
        )
    daemon = NodeDaemon(session.runtime_dir)
    publisher = Publisher(daemon, server, name, claims.node_uid, claims.pod)
    if startup_taint:
        publisher.taint = StartupTaint(server, name, startup_taint)
    if topology:
        publisher.topology = Topology(server, name, claims.node_uid)
    writes = url not in {"", "none"}
    serve(Reporter(daemon, publisher, listen, writes=writes), debug=session.debug)


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
@click.option("--kata-classes", is_flag=True, help="Remove the files of kata-class too.")
@api_options()
def release_nodes(
    daemonset: str, *, timeout_s: int, kata_classes: bool, api: str | None, token: str, ca: str
) -> None:
    """Restore affinities on every node of a cluster.

    Rolls the DaemonSet out once more, with a step in which each node's daemon runs `kata-pin
    release`, and waits until all pods are ready. Run by the chart before it is uninstalled.
    """
    import asyncio

    from kata_pin.options.cluster.api import Rollout
    from kata_pin.options.cluster.values import MAX_ANSWER, is_object_name
    from kata_pin.peers.http import HttpClient

    namespace, _, name = daemonset.partition("/")
    if not is_object_name(namespace) or not is_object_name(name):
        raise click.BadParameter("expected NAMESPACE/DAEMONSET", param_hint="DAEMONSET")
    client = HttpClient(api or in_cluster(), token=token, ca=ca, most=MAX_ANSWER)
    with screen.progress("restoring affinities on all nodes") as done:
        rollout = Rollout(client, namespace, name, lambda text: done(0, text), kata_classes)
        result = asyncio.run(rollout.release(timeout_s))
    click.echo(result)


def in_cluster() -> str:
    """Return the API server of the pod's environment, empty outside of a cluster."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{one}", "") for one in ("HOST", "PORT"))
    if not host:
        return ""
    return f"https://{f'[{host}]' if ':' in host else host}:{port or 443}"
