"""`kata-pin pin` and `unpin`: by the daemon, or here and now when there is none."""

from __future__ import annotations

from typing import Literal

import click

from kata_pin.cli.options import Session, complete_sandbox, global_options
from kata_pin.cli.render import screen


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@global_options
@click.pass_obj
def pin(session: Session, sandbox: str | None) -> int:
    """Set the affinities of one sandbox, or of all, now.

    Without a daemon they are set once, from /proc and Kata's state. Exit status 1 if the kernel
    refused an affinity.
    """
    return _change(session, "pin", sandbox)


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@global_options
@click.pass_obj
def unpin(session: Session, sandbox: str | None) -> int:
    """Restore the original affinities of one sandbox, or of all.

    Each thread gets the affinity that was first seen for its role, else that of pid 1. The daemon
    does not manage such a sandbox until `pin`, even after a restart.
    """
    return _change(session, "unpin", sandbox)


def _change(session: Session, verb: Literal["pin", "unpin"], name: str | None) -> int:
    document = session.provider.change(verb, name)
    screen.report(document, json=session.json, by="reports:applied")
    refused = {"refused", "denied", "unverified"}
    outcomes = {r.outcome for one in document.sandboxes for r in one.results}
    return 1 if outcomes & refused else 0
