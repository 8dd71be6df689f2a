"""`kata-pin pools`: who has which CPUs, as our own allocator gave them."""

from __future__ import annotations

import click

from kata_pin.cli.options import Session, global_options
from kata_pin.cli.render import screen
from kata_pin.model.reports.pools import PoolsDocument
from kata_pin.model.reports.state import State


@click.command()
@global_options
@click.pass_obj
def pools(session: Session) -> None:
    """Show the pools of pCPUs and their owners.

    Reserved, housekeeping, shared and exclusive pCPUs by NUMA node, then every container with what
    it was given, what waits for the runtime's next call, and who did not get what it asked for. For
    nodes on which kata-pin decides the cpusets (setting alloc.policy).
    """
    state = session.provider.state()
    if session.json:
        screen.document(pools_document(state))
        return
    from kata_pin.cli.render import pools as render_pools

    screen.show(render_pools.pools(state, screen.look()))


def pools_document(state: State) -> PoolsDocument:
    """Return the `pools` document: what the state document says of allocation."""
    return PoolsDocument(time=state.time, daemon=state.daemon, allocation=state.allocation)
