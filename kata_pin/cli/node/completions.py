"""The completion scripts of the shells, and where each shell looks for one."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import ShellComplete, get_completion_class

COMPLETE: Final = "_KATA_PIN_COMPLETE"
"""As in cli.table, by which a shell is answered."""

PLACES: Final = {
    "bash": "/usr/share/bash-completion/completions/kata-pin",
    "zsh": "/usr/share/zsh/site-functions/_kata-pin",
    "fish": "/usr/share/fish/vendor_completions.d/kata-pin.fish",
}
"""The shells, with the file that each loads when kata-pin is completed first."""


def script(shell: str) -> str:
    """Return the completion script of one of the shells of PLACES."""
    kind = get_completion_class(shell)
    assert kind is not None, "click knows every shell of the table"
    # not source() of the shell's own class: bash's starts a bash to ask for its version
    return (
        ShellComplete.source(kind(click.Group("kata-pin"), {}, "kata-pin", COMPLETE)).strip() + "\n"
    )
