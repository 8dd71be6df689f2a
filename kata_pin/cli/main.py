"""The entry of `kata-pin`: the group of commands, and how errors are reported.

Commands are imported when they run: `kata-pin --help` imports click only. Expected failures are one
line and a hint on stderr, never a traceback. Exit statuses are those of base/errors.py, 2 for
usage, 130 after Ctrl-C, 141 if the reader of the output went away.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module

import click

from kata_pin import __version__
from kata_pin.base.errors import KataPinError, reason_of
from kata_pin.cli.options import CommandGroup, Session, global_options
from kata_pin.cli.quick import COMMANDS, COMPLETE, HELP
from kata_pin.cli.render import screen


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
    screen.tolerate_any_text()
    session = Session()
    given = sys.argv[1:] if arguments is None else arguments
    try:
        return _invoke(given, session)
    except BrokenPipeError:
        _forget_stdout()
        return 141
    except (KeyboardInterrupt, click.Abort):
        return 130
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        if "--json" in given:  # wrong usage ends the parsing, perhaps before this option
            place = getattr(error, "ctx", None)
            path = place.command_path if place else "kata-pin"
            _print_error(error.format_message(), f"{path} --help", error.exit_code)
        error.show()
        return error.exit_code
    except KataPinError as error:
        return _failed(session, error, error.exit_code)
    except OSError as error:  # our own reads are translated; what is left is the output
        _forget_stdout()
        place = "" if error.filename else "standard output: "
        failure = KataPinError(f"{place}{reason_of(error)}")
        failure.__cause__ = error
        return _failed(session, failure, 1)
    except Exception as error:  # noqa: BLE001 - the last barrier: no traceback unless asked for
        unexpected = KataPinError(
            f"unexpected {type(error).__name__}: {reason_of(error)}",
            hint="this is a bug in kata-pin; --debug prints the traceback",
        )
        unexpected.__cause__ = error
        return _failed(session, unexpected, 1)


def _invoke(arguments: list[str], session: Session) -> int:
    """Run a command, or answer a shell's completion; return the exit status.

    click's own `main` turns a closed pipe into status 1, so it is not used.
    """
    instruction = os.environ.get(COMPLETE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "kata-pin", COMPLETE, instruction)
    with cli.make_context("kata-pin", list(arguments), obj=session) as context:
        outcome = cli.invoke(context)
    sys.stdout.flush()
    return outcome if isinstance(outcome, int) else 0


def _failed(session: Session, error: KataPinError, status: int) -> int:
    """Print an error: one line and a hint, and a JSON document with --json."""
    if session.debug:
        import traceback

        traceback.print_exception(error)
    if session.json:
        _print_error(error.message, error.hint, status)
    screen.failure(error)
    return status


def _print_error(message: str, hint: str, status: int) -> None:
    """Print an error as a JSON document."""
    from kata_pin.base.documents.answers import ErrorDocument

    screen.document(ErrorDocument(error=message, hint=hint, exit_status=status))


def _forget_stdout() -> None:
    """Redirect stdout to /dev/null, so that the interpreter's last flush does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    main()
