"""What is answered without click: the same words as click's."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from kata_pin.cli import quick
from kata_pin.cli.main import cli, run
from kata_pin.cli.options import complete_sandbox
from kata_pin.cli.quick import COMMANDS, COMPLETE, OF_SANDBOXES
from tests.unit.cli import documents as docs
from tests.unit.conftest import Serve


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_help_is_that_of_click(
    option: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is made by scripts/man of the same words."""
    monkeypatch.setenv("COLUMNS", columns)
    assert run([option]) == 0
    text = capsys.readouterr().out
    assert quick.answered([option])
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("arguments", [[], ["show", "--help"], ["--help", "show"], ["--json"]])
def test_anything_else_is_left_to_click(arguments: list[str]) -> None:
    """Only the group's own help is written here."""
    assert not quick.answered(arguments)


def test_a_narrow_terminal_is_left_to_click(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file fits 80 columns."""
    monkeypatch.setenv("COLUMNS", "79")
    assert not quick.answered(["--help"])


def test_sandboxes_are_the_first_argument_of_the_same_commands() -> None:
    """The table says of each command what its declaration says."""
    found = set()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        arguments = [one for one in command.params if isinstance(one, click.Argument)]
        if arguments and arguments[0]._custom_shell_complete is complete_sandbox:
            found.add(name)
    assert found == OF_SANDBOXES


WORDS = (
    "kata-pin show ",
    "kata-pin show default/",
    "kata-pin --json pin d",
    "kata-pin --config {config} unpin none",
    "kata-pin doctor --config {config} ",
    "kata-pin ",
    "kata-pin --json p",
    "kata-pin --config {config} s",
)
"""What is answered here, with the word to complete at the end."""


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("words", WORDS)
def test_completions_are_those_of_click(
    words: str,
    shell: str,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pods, ids and commands, in click's order and form."""
    config = serve({"state": lambda _: docs.state(docs.database(), docs.drifted())})
    text = words.format(config=config)
    if "--config" not in text:
        text = text.replace("kata-pin", f"kata-pin --config {config}")
    monkeypatch.setenv(COMPLETE, f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", text)
    monkeypatch.setenv("COMP_CWORD", str(len(text.split(" ")) - 1))
    assert run([]) == 0
    wanted = capsys.readouterr().out
    if not quick.answered([]):
        assert shell == "zsh"  # which shows the commands' summaries, so click answers
        assert words in {"kata-pin ", "kata-pin --json p", "kata-pin --config {config} s"}
        return
    assert capsys.readouterr().out == wanted
    assert wanted or "none" in words


@pytest.mark.parametrize(
    "words",
    [
        "kata-pin show --",
        "kata-pin show -n ",
        "kata-pin show a b",
        "kata-pin show 'a",
        "kata-pin --config ",
        "kata-pin --config /no/such/file show ",
        "kata-pin --debug show ",
        "kata-pin alloc ",
        "kata-pin sohw ",
        "kata-pin --config=x show ",
    ],
)
def test_other_words_are_left_to_click(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What click's declarations decide is asked of click."""
    monkeypatch.setenv(COMPLETE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    assert not quick.answered([])


@pytest.mark.parametrize("output", [">&-", ">/dev/full", ">&1 | true"])
@pytest.mark.parametrize("command", ["--help", "show", "completion bash"])
def test_an_output_that_fails_ends_as_with_click(command: str, output: str, serve: Serve) -> None:
    """One line or none, no traceback, and the same exit status."""
    config = serve({"state": lambda _: docs.state(docs.database())})
    words = command if command == "--help" else f"--config {config} {command}"
    gone = "import select; p = select.poll(); p.register(1, 0); p.poll(); " if "|" in output else ""
    ended = []
    for module in ("main", "entry"):
        code = f"{gone}import kata_pin.cli.{module} as m; m.main()"
        line = f"{sys.executable} -c '{code}' {words} {output}; echo ${{PIPESTATUS[0]}} >&2"
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, check=False, timeout=60
        )
        ended.append(done.stderr)
    assert ended[0] == ended[1]
    assert "Traceback" not in ended[0]


def test_completion_after_a_typo_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key pressed in the shell prints no usage error, only words."""
    monkeypatch.setenv("_KATA_PIN_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "kata-pin sohw do")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert run([]) == 0
    assert capsys.readouterr() == ("plain,doctor\n", "")
