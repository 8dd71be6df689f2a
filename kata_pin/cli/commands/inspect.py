"""`kata-pin who`, `map`, `explain`, `check`, `doctor` and `history`: read-only."""

from __future__ import annotations

import re
from typing import Final

import click

from kata_pin.cli.options import Session, complete_sandbox, global_options
from kata_pin.cli.render import screen
from kata_pin.model.reports.map import MapDocument, MapSandbox
from kata_pin.model.reports.state import State

FOUND = 3
"""Exit status of `check` with findings that fail."""


@click.command()
@click.argument("cpu", type=click.IntRange(0, 8191))
@global_options
@click.pass_obj
def who(session: Session, cpu: int) -> None:
    """Show every host thread that may run on a pCPU.

    Grouped by process, with owners. On an exclusive pCPU, processes that do not belong to the
    owner's sandbox are marked as intruders. Kernel threads are summarised.
    """
    from kata_pin.cli.reports import who as who_report

    document = who_report.who(session.provider.state(), cpu)
    screen.report(document, json=session.json, by="reports:who")


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
@global_options
@click.pass_obj
def check(session: Session) -> int:
    """Check that every thread has its expected affinity.

    Exit status 3 on drift, on an exclusive pCPU of two sandboxes and, with `intruders: fail`, on a
    host process that may run on an exclusive pCPU.
    """
    from kata_pin.cli.reports import findings
    from kata_pin.cli.reports import who as who_report
    from kata_pin.config.tree import Intruders

    state = session.provider.state()
    document = findings.check(
        state,
        who_report.intruders(state),
        intruders_fail=session.config.intruders is Intruders.FAIL,
    )
    screen.report(document, json=session.json, by="reports:check")
    return 0 if document.ok else FOUND


@click.command()
@global_options
@click.pass_obj
def doctor(session: Session) -> int:
    """Check this node's prerequisites and report what is missing.

    Capabilities, kernel, debugfs, process events, hooks, Kata's and the kubelet's configuration,
    other programs that set affinities, and for each sandbox how its threads were identified, which
    overhead modes are usable and which vhost workers serve its interfaces. Exit status 1 if a check
    fails.
    """
    from kata_pin.cli.reports import doctor_node

    document = doctor_node.examine(session.config, session.provider, file=session.config_file)
    screen.report(document, json=session.json, by="reports:doctor")
    return 0 if document.ok else 1


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
    screen.report(document, json=session.json, by="reports:history")
