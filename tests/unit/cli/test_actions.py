"""`show`, `pin` and `unpin` without click: the same words, output and exit status as with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.documents.answers import Applied
from kata_pin.base.errors import KataPinError
from kata_pin.cli.actions import act
from kata_pin.cli.main import run
from kata_pin.cli.quick import COMPLETE, action
from tests.unit.cli import documents as docs
from tests.unit.conftest import Serve

STATE = docs.state(docs.database(), docs.drifted(), docs.lost())


def _refused(_: object) -> Any:
    raise KataPinError("not now", hint="later")


ANSWERS: dict[str, Any] = {
    "served": {
        "state": lambda _: STATE,
        "pin": lambda _: Applied(kind="pin", sandboxes=()),
        "unpin": lambda _: Applied(
            kind="unpin", sandboxes=(), options_failed=("option siren: why",)
        ),
    },
    "refused": dict.fromkeys(("state", "names", "pin", "unpin"), _refused),
    "no document": dict.fromkeys(("state", "names", "pin", "unpin"), lambda _: {"version": 2}),
}
"""What the daemon says."""

LINES = (
    "show",
    "show default/db-0",
    "show db-0 --json",
    "--json show",
    "show nobody",
    "show nobody --json",
    "pin",
    "pin db-0",
    "pin --json",
    "unpin",
    "unpin nobody",
)


@pytest.mark.parametrize("answers", ANSWERS)
@pytest.mark.parametrize("line", LINES)
def test_what_is_done_is_what_click_does(
    line: str, answers: str, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents, errors, and what was not set."""
    arguments = [*line.split(), "--config", str(serve(ANSWERS[answers]))]
    wanted = run(arguments), capsys.readouterr()
    plain = action(arguments)
    assert plain is not None
    assert (act(plain), capsys.readouterr()) == wanted
    assert wanted[1].out or wanted[1].err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--json"],
        ["top"],
        ["show", "a", "b"],
        ["show", ""],
        ["show", "-n", "default"],
        ["show", "--cpus"],
        ["show", "--help"],
        ["show", "--", "a"],
        ["--debug", "pin"],
        ["--config=file", "show"],
        ["show", "--config", ""],
        ["show", "--config"],
        ["--config", "/no/such/file", "show"],
    ],
)
def test_anything_else_is_left_to_click(arguments: list[str]) -> None:
    """Options, and whatever is wrong."""
    assert action(arguments) is None


def test_a_shell_that_completes_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives no arguments, but the variable decides."""
    monkeypatch.setenv(COMPLETE, "bash_complete")
    assert action(["pin"]) is None


def test_the_last_of_two_files_counts(tmp_path: Path) -> None:
    """As with click."""
    first, last = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.touch()
    last.touch()
    plain = action(["--config", str(first), "show", "--config", str(last)])
    assert plain is not None
    assert plain.config == str(last)
