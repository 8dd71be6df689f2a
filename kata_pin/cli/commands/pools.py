"""`kata-pin pools`: the pools of the allocator and their owners."""

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
    """Show the allocator's pools of pCPUs and their owners.

    Reserved, housekeeping, shared and exclusive pCPUs per NUMA node, then the pCPUs of every
    container, cpusets that were not sent yet, and refused requests. For nodes on which kata-pin
    allocates CPUs (setting alloc.policy).
    """
    state = session.provider.state()
    if session.json:
        screen.document(pools_document(state))
        return
    from kata_pin.cli.render import pools as render_pools

    screen.show(render_pools.pools(state, screen.output()))


def pools_document(state: State) -> PoolsDocument:
    """Return the `pools` document: what the state document says of allocation."""
    return PoolsDocument(time=state.time, daemon=state.daemon, allocation=state.allocation)
