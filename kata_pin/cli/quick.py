"""What is known without click and YAML: the commands, the daemon's directory, some answers."""

from __future__ import annotations

import os
import stat
import sys

COMPLETE = "_KATA_PIN_COMPLETE"
"""The environment variable by which a shell asks for completions (click's protocol)."""

COMMANDS = {
    "show": "cli.commands.show:show",
    "top": "options.isolation.top_command:top",
    "who": "cli.commands.inspect:who",
    "map": "cli.commands.inspect:guest_map",
    "explain": "cli.commands.inspect:explain",
    "history": "cli.commands.inspect:history",
    "check": "cli.commands.inspect:check",
    "prove": "cli.commands.prove:prove",
    "metrics": "cli.commands.inspect:metrics",
    "doctor": "cli.commands.inspect:doctor",
    "draw": "options.pictures.command:draw",
    "pools": "options.allocation.command:pools",
    "alloc": "options.allocation.command:alloc",
    "policy": "options.allocation.command:policy",
    "pin": "cli.commands.daemon:pin",
    "unpin": "cli.commands.daemon:unpin",
    "bind": "cli.commands.daemon:bind",
    "run": "cli.commands.daemon:run",
    "release": "cli.commands.install:release",
    "release-nodes": "options.cluster.command:release_nodes",
    "reporter": "options.cluster.command:reporter",
    "reload": "cli.commands.daemon:reload",
    "config": "cli.commands.config:config",
    "install": "cli.commands.install:install",
    "uninstall": "cli.commands.install:uninstall",
    "kata-class": "cli.commands.kata_class:kata_class",
    "completion": "cli.commands.daemon:completion",
}
"""Every command in the order of the help: its module and name below kata_pin."""

OF_SANDBOXES = frozenset(
    {
        *("show", "top", "map", "explain", "history"),
        *("check", "prove", "doctor", "pin", "unpin", "bind"),
    }
)
"""Commands whose first argument is a sandbox."""


# The daemon's directory, read from a configuration without a parser of YAML.

DEFAULT_FILE = "/etc/kata-pin/config.yaml"
RUNTIME_DIR = "/run/kata-pin"
"""Both as in kata_pin.base.config, whose import costs more than a question to the daemon."""

_KEY = "runtime_dir"


def plain_runtime_dir(path: str) -> str | None:
    """Return the directory that a file names, or the default; None if it takes a parser to know.

    The default also where there is no file.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a FIFO would hang
            return None
        with open(path, encoding="utf-8") as file:
            lines = [one for one in file if _KEY in one and not one.lstrip().startswith("#")]
    except FileNotFoundError:
        return RUNTIME_DIR
    except (OSError, ValueError):  # not text, or no path
        return None
    if not lines:
        return RUNTIME_DIR
    key, _, text = lines[0].partition(":")
    value = text.partition(" #")[0].strip()
    is_plain = value.startswith("/") and not any(one in value for one in " \t'\"#")
    if (
        key == _KEY
        and text.startswith((" ", "\t"))
        and is_plain
        and "".join(lines).count(_KEY) == 1
    ):
        return value
    return None


# Answers without click: the help of `kata-pin`, and a shell that completes.
#
# Importing click takes as long as starting Python. What is not answered here, click answers, in the
# same words (tests/unit/cli/test_quick.py).

HELP = os.path.join(os.path.dirname(__file__), "help.txt")
"""What click prints for `kata-pin --help` on a terminal of HELP_COLUMNS or more (scripts/man)."""

HELP_COLUMNS = 80
_SPECIAL = frozenset("'\"\\=#")
"""What a shell or click gives a meaning beyond being part of a word."""


def answered(arguments: list[str]) -> bool:
    """Answer on stdout if that needs no click; return whether it was done.

    An output that fails is left to the command line, which fails again and says why.
    """
    try:
        text = _answer(arguments)
        if text is None or sys.stdout is None:
            return False
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, UnicodeError):
        return False
    return True


def _answer(arguments: list[str]) -> str | None:
    shell = os.environ.get(COMPLETE)
    if shell:
        words = _completions(shell)
        return None if words is None else "\n".join(words) + "\n"
    if arguments in (["--help"], ["-h"]) and _columns() >= HELP_COLUMNS:
        with open(HELP, encoding="utf-8") as file:
            return file.read()
    return None


def sandbox_names(runtime_dir: str, incomplete: str) -> list[str]:
    """Return the pods and ids that start with `incomplete`; none if no daemon answers quickly."""
    import json

    from kata_pin.base.errors import KataPinError
    from kata_pin.service.exchange import exchange

    try:
        line = exchange(f"{runtime_dir}/status.sock", b'{"version":1,"verb":"names"}\n', 0.5)
        sandboxes = json.loads(line)["document"]["sandboxes"]
        names = [str(name) for one in sandboxes for name in (one["pod"], one["id"])]
    except (KataPinError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def _completions(shell: str) -> list[str] | None:
    """Return the words as bash or zsh reads them; None if it takes click to know them."""
    words = os.environ.get("COMP_WORDS", "")
    number = os.environ.get("COMP_CWORD", "")
    if not number.isdecimal() or not _SPECIAL.isdisjoint(words):
        return None
    given = words.split()
    incomplete = "".join(given[int(number) : int(number) + 1])
    plain = Plain.of(given[1 : int(number)])
    if plain is None or incomplete.startswith("-") or len(plain.words) > 1:
        return None
    if not plain.words:
        if shell != "bash_complete":  # the others show summaries too
            return None
        return [f"plain,{name}" for name in COMMANDS if name.startswith(incomplete)]
    runtime_dir = plain_runtime_dir(plain.config or DEFAULT_FILE)
    if shell not in _FORMS or plain.words[0] not in OF_SANDBOXES or runtime_dir is None:
        return None
    return [_FORMS[shell].format(name) for name in sandbox_names(runtime_dir, incomplete)]


_FORMS = {"bash_complete": "plain,{}", "zsh_complete": "plain\n{}\n_"}
"""A word as the shell's script reads it."""


class Plain:
    """A command line without other options than --config FILE and --json."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.config: str | None = None
        self.json = False

    @classmethod
    def of(cls, given: list[str]) -> Plain | None:
        """Return what the words say; None if it takes click to know."""
        found = cls()
        rest = iter(given)
        for word in rest:
            if word == "--config":
                found.config = next(rest, "")
                if not os.access(found.config, os.R_OK):
                    return None
            elif word == "--json":
                found.json = True
            elif word and not word.startswith("-"):
                found.words.append(word)
            else:
                return None
        return found if not found.words or found.words[0] in COMMANDS else None


# Commands without click (actions.py): those that are typed most, in the form that is typed most.

_ACTIONS = frozenset({"show", "pin", "unpin"})


def action(arguments: list[str]) -> Plain | None:
    """Return `show`, `pin` or `unpin` of one sandbox or of all; None for what click has to read."""
    plain = None if os.environ.get(COMPLETE) else Plain.of(arguments)
    if plain is None or len(plain.words) not in {1, 2} or plain.words[0] not in _ACTIONS:
        return None
    return plain


def _columns() -> int:
    """Return the terminal's width as click finds it (shutil.get_terminal_size)."""
    try:
        return int(os.environ["COLUMNS"]) or _size()
    except (KeyError, ValueError):
        return _size()


def _size() -> int:
    try:
        return os.get_terminal_size(1).columns or HELP_COLUMNS
    except OSError:
        return HELP_COLUMNS
