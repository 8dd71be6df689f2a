"""`kata-pin completion`: completion scripts for shells."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell's completion script.

    `install` puts the scripts where the shells look for them; for another place: kata-pin
    completion bash > FILE. Sandboxes are completed while the daemon runs.
    """
    from kata_pin.cli.node.completions import script

    click.echo(script(shell), nl=False)
