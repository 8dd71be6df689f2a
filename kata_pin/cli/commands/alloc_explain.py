"""`kata-pin alloc explain`: why one container has the CPUs that it has."""

from __future__ import annotations

from typing import Final

import click

from kata_pin.cli.options import Session, global_options
from kata_pin.cli.render import screen
from kata_pin.cli.reports.words import safe
from kata_pin.errors import KataPinError
from kata_pin.model.reports.pools import AllocExplainDocument, Grant
from kata_pin.model.reports.state import State

SHOWN: Final = 5
"""Containers named in an error."""


@click.command()
@click.argument("container")
@global_options
@click.pass_obj
def explain(session: Session, container: str) -> None:
    """Explain why a container has its CPUs.

    Shows the rule or override that decided, its pCPUs, and the cpuset sent to the runtime.
    CONTAINER is an id or its start, a name, or namespace/pod/name; `vm:` and a sandbox id for a VM.
    """
    grant = choose_grant(session.provider.state(), container)
    screen.report(AllocExplainDocument(grant=grant), json=session.json, by="pools:explain")


def choose_grant(state: State, text: str) -> Grant:
    """Return the one grant that `text` names; raises KataPinError when there is none or several."""
    allocation = state.allocation
    if allocation is None:
        raise KataPinError(
            "CPU allocation is off (alloc.policy: none)",
            hint="kata-pin explain SANDBOX explains affinities",
        )
    if allocation.suspended:
        raise KataPinError(f"CPU allocation is suspended: {allocation.suspended}")
    every = allocation.grants
    for matches in (
        [one for one in every if text in {one.id, f"{one.pod}/{one.name}"}],
        [one for one in every if one.name == text],
        [one for one in every if text and one.id.startswith(text)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            named = ", ".join(f"{safe(one.pod)} ({one.id[:12]})" for one in matches[:SHOWN])
            raise KataPinError(
                f"{safe(text)!r} matches {len(matches)} containers: {named}",
                hint="give more of the id, or namespace/pod/name",
            )
    raise KataPinError(f"no container {safe(text)!r}", hint="kata-pin pools lists them")
