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
    """Show which pCPU is which vCPU, which guest CPU, and whose.

    From left to right: the pCPUs of a vCPU thread, the vCPU's index, the number that Linux in the
    guest has for it, and the container that has it as its own. Each link is measured, proven,
    inferred (a broken line) or unknown (a cross); guest CPUs that are only inferred are used where
    the setting guest.act_on_inferred says so, unknown ones never. Below, what each container should
    use and what its guest was told.
    """
    from kata_pin.cli.reports.selection import choose

    provider = session.provider
    chosen = "" if sandbox is None else choose(provider.names(), sandbox).id
    document = map_document(provider.state(chosen))
    if session.json:
        screen.document(document)
        return
    from kata_pin.cli.render import map as render_map

    screen.show(render_map.guest_map(document, screen.look()))


def map_document(state: State) -> MapDocument:
    """Return the `map` document: what the state document says of guests."""
    return MapDocument(
        time=state.time,
        daemon=state.daemon,
        sandboxes=tuple(
            MapSandbox(one.id, one.pod, one.state, one.guest) for one in state.sandboxes
        ),
    )
