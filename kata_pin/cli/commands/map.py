"""`kata-pin map`."""

from __future__ import annotations

import click

from kata_pin.cli.options import Session, complete_sandbox, global_options
from kata_pin.cli.render import screen
from kata_pin.model.reports.map import MapDocument, MapSandbox
from kata_pin.model.reports.state import State


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
