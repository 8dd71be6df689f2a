"""`kata-pin pin` and `unpin`: by the daemon, or here and now when there is none."""

from __future__ import annotations

import click

from kata_pin.cli.options import Session, complete_sandbox, global_options
from kata_pin.cli.render import screen
from kata_pin.model.reports.applied import Applied


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@global_options
@click.pass_obj
def pin(session: Session, sandbox: str | None) -> int:
    """Set the affinities of one sandbox, or of all, now.

    Without a daemon they are set once, from /proc and Kata's state. Exit status 1 if the kernel
    refused an affinity.
    """
    return _report(session, session.provider.pin(_chosen(session, sandbox)))


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@global_options
@click.pass_obj
def unpin(session: Session, sandbox: str | None) -> int:
    """Restore the original affinities of one sandbox, or of all.

    Each thread gets the affinity that was first seen for its role, else that of pid 1. The daemon
    does not manage such a sandbox until `pin`, even after a restart.
    """
    return _report(session, session.provider.unpin(_chosen(session, sandbox)))


def _chosen(session: Session, name: str | None) -> str | None:
    """Return the id of the sandbox that was named, None for all."""
    if name is None:
        return None
    from kata_pin.cli.reports.selection import choose

    return choose(session.provider.names(), name).id


def _report(session: Session, document: Applied) -> int:
    if session.json:
        screen.document(document)
    else:
        from kata_pin.cli.render import reports as render_reports

        screen.show(render_reports.applied(document, screen.output()))
    refused = {"refused", "denied"}
    outcomes = {r.outcome for one in document.sandboxes for r in one.results}
    return 1 if outcomes & refused else 0
