"""`kata-pin who`, `map`, `explain`, `doctor`, `history`, `check` and `metrics`: read-only."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.answers import ConfigDocument, MapDocument, MapSandbox
from kata_pin.base.documents.state import State
from kata_pin.base.values import Remedy, here
from kata_pin.cli.options import (
    complete_sandbox,
    cpu_list,
    global_options,
    in_namespace,
    measured_for,
    time_span,
)
from kata_pin.cli.render import screen
from kata_pin.cli.session import Session

if TYPE_CHECKING:
    from collections.abc import Container

    from kata_pin.base.config.tree import Config, Endpoint
    from kata_pin.base.documents.answers import MetricsDocument
    from kata_pin.base.documents.check import CheckDocument, Finding
    from kata_pin.base.errors import ConfigError
    from kata_pin.cli.reports.findings import Looked


@click.command()
@click.argument("cpus", required=False, callback=cpu_list)
@global_options
@click.pass_obj
def who(session: Session, cpus: CpuSet | None) -> None:
    """Show every host thread that may run on a pCPU.

    Grouped by process, with owners. CPUS is a number or a list such as 0-3,8: who may run on any of
    them; without it, on any exclusive pCPU. On an exclusive pCPU, processes that do not belong to
    the owner's sandbox are marked as intruders. Kernel threads are summarised.
    """
    from kata_pin.cli.reports import who as who_report

    if cpus is not None and not cpus:
        raise click.UsageError("CPUS is empty: give a pCPU or a list such as 0-3,8")
    state = session.connect().state()
    document = who_report.who(state, who_report.exclusive(state) if cpus is None else cpus)
    screen.report(document, json=session.json, by="cli.render.who:who")


@click.command()
@click.argument("sandbox", shell_complete=complete_sandbox)
@global_options
@click.pass_obj
def explain(session: Session, sandbox: str) -> None:
    """Explain where the threads of a sandbox run and why.

    Which containers count, which CPUs are exclusive and how that is known, which vCPU is paired
    with which pCPU, and what prevents a better placement.
    """
    provider = session.connect()
    document = provider.explain(provider.chosen(sandbox))
    screen.report(document, json=session.json, by="cli.render.reports:explain")


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@in_namespace
@global_options
@click.pass_obj
def doctor(session: Session, sandbox: str | None, namespace: str | None) -> int:
    """Check this node's prerequisites and report what is missing.

    Capabilities, kernel, debugfs, process events, hooks, Kata's and the kubelet's configuration,
    other programs that set affinities, and for each sandbox how its threads were identified, which
    overhead modes are usable and which vhost workers serve its interfaces. With SANDBOX or -n only
    the daemon and these sandboxes. Exit status 1 if a check fails.
    """
    from kata_pin.base.documents.measured import WatchDocument
    from kata_pin.cli.doctor import node

    provider = session.connect()
    if sandbox is not None or namespace is not None:
        document = node.examine_sandboxes(
            session.config, provider.state, provider.chosen(sandbox, namespace), namespace
        )
    else:
        config, wrong = _settings(session)
        watch = partial(provider.daemons, WatchDocument, "watch")
        document = node.examine(
            config, provider.state, watch, file=session.config_file, wrong=wrong
        )
    screen.report(document, json=session.json, by="cli.render.reports:doctor")
    return 0 if document.ok else 1


def _settings(session: Session) -> tuple[Config, ConfigError | None]:
    """Return the settings; those of the running daemon where the file is wrong, with its error."""
    from kata_pin.base.errors import ConfigError, DaemonError
    from kata_pin.service.configuration import from_data

    try:
        return session.config, None
    except ConfigError as error:
        try:
            running = session.connect().daemons(ConfigDocument, "config")
            return from_data(running.settings), error
        except DaemonError:
            raise error from None


@click.command(name="map")
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@global_options
@click.pass_obj
def guest_map(session: Session, sandbox: str | None) -> None:
    """Show which vCPU, guest CPU and container each pCPU serves.

    From left to right: the pCPUs of a vCPU thread, the vCPU's index, its CPU number in the guest's
    Linux, and the container that owns it. Each link is measured, proven, inferred (broken line) or
    unknown (cross). Inferred guest CPUs are used only with the setting guest.act_on_inferred,
    unknown ones never. Below: the guest CPUs that each container should use and those applied.
    """
    provider = session.connect()
    document = map_document(provider.state_of(sandbox))
    screen.report(document, json=session.json, by="cli.render.who:guest_map")


def map_document(state: State) -> MapDocument:
    """Return the `map` document: what the state document says of guests."""
    return MapDocument(
        time=state.time,
        daemon=state.daemon,
        sandboxes=tuple(
            MapSandbox(one.id, one.pod, one.state, one.guest) for one in state.sandboxes
        ),
    )


@click.command()
@click.argument("sandbox", required=False, default="", shell_complete=complete_sandbox)
@click.option(
    "--since",
    metavar="SPAN",
    callback=time_span,
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
    until the limits in `history:` remove them. Events of the node follow; with SANDBOX, those that
    name it.
    """
    document = session.connect().history(sandbox, since_s=since, limit=limit)
    screen.report(document, json=session.json, by="cli.render.reports:history")


STATUSES: Final = {"ok": 0, "findings": 3, "unknown": 4}
"""Exit status by verdict."""


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@in_namespace
@measured_for
@click.option("--all", "everything", is_flag=True, help="List findings that are report-only too.")
@global_options
@click.pass_obj
def check(
    session: Session,
    sandbox: str | None,
    namespace: str | None,
    seconds: int | None,
    *,
    everything: bool,
) -> int:
    """Check affinities, and who runs on exclusive pCPUs.

    Without SANDBOX: of all sandboxes. Exit status 3 on drift, on an exclusive pCPU of two
    sandboxes, if user processes or other sandboxes ran on one longer than `isolation.max_foreign`
    allows and, with `intruders: fail`, if they may run on one. Exit status 4 if nothing was found
    but not everything could be checked: no permission, or the daemon is dead or does not answer.
    `kata-pin prove` measures longer and shows everything that ran.
    """
    document = _checked(session, sandbox, namespace, seconds)
    screen.report(
        document, json=session.json, by="cli.render.findings:check", everything=everything
    )
    return STATUSES[document.verdict]


def _measured(
    session: Session, state: State, about: Container[str] | None, seconds: int | None
) -> Looked:
    """Return who ran on exclusive pCPUs, measured now and as the daemon saw it."""
    from kata_pin.base.documents.measured import WatchDocument
    from kata_pin.base.errors import DaemonError
    from kata_pin.cli.reports import owners, prove

    limits, provider = session.config.isolation, session.connect()
    asked_s = limits.check_s if seconds is None else seconds
    wanted = prove.ProofRequest(about, asked_s, limits.max_foreign)
    looked = prove.look(state, provider.state, wanted)
    if state.daemon.running:
        with suppress(DaemonError):  # it ended, or is older than the watch
            watch = provider.daemons(WatchDocument, "watch")
            owned = owners.owners(state, about)
            looked = prove.with_watch(looked, watch, owned, prove.may_still_run)
    return looked


def _checked(
    session: Session, sandbox: str | None, namespace: str | None, seconds: int | None
) -> CheckDocument:
    """Return the document; raises KataPinError for a name that fits nothing, ConfigError."""
    from kata_pin.base.config.tree import Intruders
    from kata_pin.base.documents.answers import SandboxName
    from kata_pin.base.documents.check import Findings
    from kata_pin.base.errors import ConfigError, DaemonError, KataPinError
    from kata_pin.cli.reports import findings
    from kata_pin.cli.reports import who as reports_who
    from kata_pin.cli.reports.words import meant

    settings, provider = session.config, session.connect()
    try:
        state = provider.state()
    except ConfigError:
        raise
    except KataPinError as error:
        return findings.could_not_tell(str(error))
    names = (SandboxName(one.id, one.pod) for one in state.sandboxes)
    about = meant(names, sandbox, namespace)
    unknown = []
    if not state.daemon.running:
        how = "hangs" if state.daemon.silent else "is not running"
        unknown.append(f"the daemon {how}, state read from /proc ({state.daemon.reason})")
    hidden = reports_who.why_hidden()
    looked = findings.NOTHING
    if (settings.isolation.check_s if seconds is None else seconds) > 0:
        looked = _measured(session, state, about, seconds)
    added: tuple[Finding, ...] = ()
    if state.daemon.running:
        with suppress(DaemonError):
            added = provider.daemons(Findings, "findings").findings
    return findings.check(
        state,
        () if hidden else reports_who.groups(state, about, looked.ran_ms),
        intruders_fail=settings.intruders is Intruders.FAIL,
        about=about,
        looked=looked,
        unknown=[*unknown, *([hidden] if hidden else [])],
        added=added,
    )


# `kata-pin metrics`: what Prometheus would scrape, read over HTTP.

_AWAY: Final = Remedy(
    "systemctl status kata-pin; kata-pin doctor says where metrics are served",
    "kubectl logs -c daemon of this pod; kata-pin doctor says where metrics are served",
)


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


def scrape(endpoint: Endpoint, runtime_dir: str) -> MetricsDocument:
    """Return the metrics; raises DaemonError, RemoteProtocolError for another answer."""
    import os
    import socket

    from kata_pin.base.config.tree import EndpointKind
    from kata_pin.base.documents.answers import MetricsDocument
    from kata_pin.base.errors import DaemonError, reason_of
    from kata_pin.service.exchange import NO_PERMISSION, read_metrics

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
