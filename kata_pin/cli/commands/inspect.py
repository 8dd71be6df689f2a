"""`kata-pin who`, `map`, `explain`, `doctor` and `history`: read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kata_pin.cli.options import (
    Session,
    complete_sandbox,
    cpu_list,
    global_options,
    in_namespace,
    time_span,
)
from kata_pin.cli.render import screen
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.reports.map import MapDocument, MapSandbox
from kata_pin.model.reports.state import State

if TYPE_CHECKING:
    from kata_pin.config import Config
    from kata_pin.errors import ConfigError


@click.command()
@click.argument("cpus", callback=cpu_list)
@global_options
@click.pass_obj
def who(session: Session, cpus: CpuSet) -> None:
    """Show every host thread that may run on a pCPU.

    Grouped by process, with owners. CPUS is a number or a list such as 0-3,8: who may run on any of
    them. On an exclusive pCPU, processes that do not belong to the owner's sandbox are marked as
    intruders. Kernel threads are summarised.
    """
    from kata_pin.cli.reports import who as who_report

    if not cpus:
        raise click.UsageError("CPUS is empty: give a pCPU or a list such as 0-3,8")
    document = who_report.who(session.provider.state(), cpus)
    screen.report(document, json=session.json, by="who:who")


@click.command()
@click.argument("sandbox", shell_complete=complete_sandbox)
@global_options
@click.pass_obj
def explain(session: Session, sandbox: str) -> None:
    """Explain where the threads of a sandbox run and why.

    Which containers count, which CPUs are exclusive and how that is known, which vCPU is paired
    with which pCPU, and what prevents a better placement.
    """
    provider = session.provider
    document = provider.explain(provider.chosen(sandbox))
    screen.report(document, json=session.json, by="reports:explain")


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
    from kata_pin.cli.reports import doctor_node

    provider = session.provider
    if sandbox is not None or namespace is not None:
        document = doctor_node.examine_sandboxes(
            session.config, provider, provider.chosen(sandbox, namespace), namespace
        )
    else:
        config, wrong = _settings(session)
        document = doctor_node.examine(config, provider, file=session.config_file, wrong=wrong)
    screen.report(document, json=session.json, by="reports:doctor")
    return 0 if document.ok else 1


def _settings(session: Session) -> tuple[Config, ConfigError | None]:
    """Return the settings; those of the running daemon where the file is wrong, with its error."""
    from kata_pin.config.file import from_data
    from kata_pin.errors import ConfigError, DaemonError

    try:
        return session.config, None
    except ConfigError as error:
        try:
            return from_data(session.provider.running_config().settings), error
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
    provider = session.provider
    document = map_document(provider.state(provider.chosen(sandbox)))
    screen.report(document, json=session.json, by="map:guest_map")


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
    until the limits in `history:` remove them.
    """
    document = session.provider.history(sandbox, since_s=since, limit=limit)
    screen.report(document, json=session.json, by="reports:history")
