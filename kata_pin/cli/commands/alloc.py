"""`kata-pin alloc`: inspect the allocator; read-only."""

from __future__ import annotations

import click

from kata_pin.cli.commands.alloc_checkpoint import compare, export
from kata_pin.cli.commands.alloc_explain import explain
from kata_pin.cli.commands.alloc_whatif import what_if


@click.group()
def alloc() -> None:
    """Inspect what the allocator did or would do."""


alloc.add_command(compare)
alloc.add_command(explain)
alloc.add_command(export)
alloc.add_command(what_if)
