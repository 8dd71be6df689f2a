"""`kata-pin metrics`: what Prometheus would scrape, read over HTTP."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

import click

from kata_pin.base.documents.answers import MetricsDocument
from kata_pin.base.errors import DaemonError, reason_of
from kata_pin.base.values import Remedy, here
from kata_pin.cli.options import Session, global_options
from kata_pin.cli.render import screen
from kata_pin.service.exchange import NO_PERMISSION
from kata_pin.service.metrics_client import read_metrics

if TYPE_CHECKING:
    from kata_pin.base.config.tree import Endpoint


@click.command()
@global_options
@click.pass_obj
def metrics(session: Session) -> None:
    """Print the daemon's metrics in Prometheus' text format.

    Reads the endpoint of the setting metrics.listen; metrics.md in docs/ or
    /usr/share/doc/kata-pin describes each.
    """
    document = scrape(session.config.metrics.listen, session.runtime_dir)
    if session.json:
        screen.document(document)
    else:
        click.echo(document.text, nl=False)


_AWAY: Final = Remedy(
    "systemctl status kata-pin; kata-pin doctor says where metrics are served",
    "kubectl logs -c daemon of this pod; kata-pin doctor says where metrics are served",
)


def scrape(endpoint: Endpoint, runtime_dir: str) -> MetricsDocument:
    """Return the metrics; raises DaemonError, RemoteProtocolError for another answer."""
    from kata_pin.base.config.tree import EndpointKind

    if endpoint.kind is EndpointKind.NONE:
        hint = "set metrics.listen to unix or to a loopback port, and restart the daemon"
        raise DaemonError("metrics are not served (metrics.listen: none)", hint=hint)
    unix = endpoint.kind is EndpointKind.UNIX
    path = os.path.join(runtime_dir, "metrics.sock")
    address = f"unix:{path}" if unix else f"http://{endpoint}/metrics"
    family = socket.AF_UNIX if unix else socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    try:
        text = read_metrics(family, path if unix else (endpoint.host, endpoint.port), address)
    except PermissionError as error:
        hint = here(NO_PERMISSION)
        raise DaemonError(f"no permission to connect to {address}", hint=hint) from error
    except OSError as error:
        raise DaemonError(
            f"no metrics from {address}: {error.strerror or reason_of(error)}", hint=here(_AWAY)
        ) from error
    return MetricsDocument(address=address, text=text.decode("utf-8", "replace"))
