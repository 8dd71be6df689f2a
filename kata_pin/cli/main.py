"""The group of commands, as click parses them.

Commands are imported when they run: `kata-pin --help` imports click only. Exit status 2 is wrong
usage; session.py has the others.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module

import click

from kata_pin import __version__
from kata_pin.cli.options import CommandGroup, global_options
from kata_pin.cli.quick import COMMANDS, COMPLETE, HELP
from kata_pin.cli.session import Session, ended, print_error


class LazyGroup(CommandGroup):
    """A group whose commands are imported when they are named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command, also one of an option of another package."""
        if cmd_name in COMMANDS:
            place = f"kata_pin.{COMMANDS[cmd_name]}"
        else:
            from kata_pin.base.config.options import command_of

            place = command_of(cmd_name)
        module, _, name = place.partition(":")
        command: click.Command | None = getattr(import_module(module), name) if name else None
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands as help.txt has it, importing none."""
        with open(HELP, encoding="utf-8") as file:
            listed = file.read().partition("\nCommands:\n")[2]
        rows = re.findall(r"^  (\S+) +(.+(?:\n    .+)*)", listed, re.MULTILINE)
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split())) for name, text in rows])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kata-pin", message="%(prog)s %(version)s")
@global_options
def cli() -> None:
    """Keep every host thread of a Kata sandbox on the CPUs that its pod was given.

    Asks the daemon or, if it is not running, reads /proc. Exit status: 0 success, 1 failure, 2
    wrong usage, 3 findings of `check` or a violation that `prove` measured, 4 `check` or `prove`
    could not tell, 78 wrong configuration.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    session = Session()
    given = sys.argv[1:] if arguments is None else arguments
    return ended(session, lambda: _invoke(given, session))


def _invoke(arguments: list[str], session: Session) -> int:
    """Run a command, or answer a shell's completion; return the exit status.

    click's own `main` turns a closed pipe into status 1, so it is not used.
    """
    instruction = os.environ.get(COMPLETE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "kata-pin", COMPLETE, instruction)
    try:
        with cli.make_context("kata-pin", list(arguments), obj=session) as context:
            outcome = cli.invoke(context)
    except click.Abort:
        return 130
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        if "--json" in arguments:  # wrong usage ends the parsing, perhaps before this option
            place = getattr(error, "ctx", None)
            path = place.command_path if place else "kata-pin"
            print_error(error.format_message(), f"{path} --help", error.exit_code)
        error.show()
        return error.exit_code
    return outcome if isinstance(outcome, int) else 0


if __name__ == "__main__":
    main()
