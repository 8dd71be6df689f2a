"""`kata-pin completion`: completion scripts for shells."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a shell's completion script.

    For bash: kata-pin completion bash > /etc/bash_completion.d/kata-pin. Sandboxes are completed
    while the daemon runs.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click.Choice above names only shells that click knows"
    click.echo(kind(ctx.find_root().command, {}, "kata-pin", "_KATA_PIN_COMPLETE").source())
