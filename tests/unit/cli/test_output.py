"""What the program does with its output: start-up cost, pipes, terminals, encodings, completion."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config
from kata_pin.base.documents.answers import NodeEvent, NodeEventKind
from kata_pin.base.documents.state import State
from kata_pin.cli.quick import DEFAULT_FILE, RUNTIME_DIR
from kata_pin.cli.render import reports
from kata_pin.cli.render.layout import NO_LIMIT, Output
from kata_pin.service.configuration import DEFAULT_FILE as CONFIGURATION_DEFAULT_FILE
from tests.support.commandline import run
from tests.unit.cli import documents as docs
from tests.unit.conftest import Serve, plain

STATE = docs.state(docs.database(), docs.drifted(), docs.lost())


def _state(document: State = STATE) -> Any:
    return {"state": lambda _: deepcopy(document)}


def test_help_imports_no_command() -> None:
    """The group's help loads neither rich nor yaml nor any command (start-up matters)."""
    code = (
        "import sys; from kata_pin.cli.main import run; run(['--help']);"
        "print([m for m in ('rich', 'yaml', 'asyncio', 'msgspec', 'kata_pin.cli.commands.show')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stdout.endswith("\n[]\n")


def test_show_needs_neither_the_daemon_nor_asyncio(serve: Serve) -> None:
    """`show` with a daemon loads no daemon code, no settings, no asyncio."""
    config = serve(_state())
    code = (
        "import sys; from kata_pin.cli.main import run;"
        f"run(['show', '--config', {str(config)!r}]);"
        "print([m for m in ('asyncio', 'kata_pin.daemon', 'google', 'yaml', 'kata_pin.base.config',"
        " 'rich.console', 'psutil', 'pyroute2', 'json') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stdout.endswith("\n[]\n")


def test_a_reader_that_goes_away_is_quiet(serve: Serve) -> None:
    """A closed pipe ends the program with 141 and no word."""
    config = serve(_state(docs.large()))
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "kata_pin.cli.main", "show", "--json", "--config", str(config)],
            stdout=pipe,
            stderr=subprocess.PIPE,
            check=False,
            timeout=20,
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
def test_an_output_that_fails_is_told(serve: Serve, redirection: str) -> None:
    """A full disk is one line and status 1; a closed stdout is no failure."""
    command = f"{sys.executable} -m kata_pin.cli.main show --config {serve(_state())} {redirection}"
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, timeout=20, check=False
    )
    told = "kata-pin: standard output: No space left on device\n"
    expected = (1, told) if "full" in redirection else (0, "")
    assert (done.returncode, done.stderr) == expected


@pytest.mark.parametrize("watch", [["--watch", "0.2"], ["--watch"], ["-n", "default", "--watch"]])
def test_watch_goes_on_until_it_is_interrupted(serve: Serve, watch: list[str]) -> None:
    """The state is shown again and again; Ctrl-C ends it with 130 and no word.

    On a busy machine there may be the line that says that it waits.
    """
    state = docs.state(docs.database())
    config = str(serve(_state(state)))
    command = [sys.executable, "-m", "kata_pin.cli.main", "show", *watch, "--json"]
    with subprocess.Popen(
        [*command, "--config", config], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        documents = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    assert documents == [plain(state), plain(state)]
    waited = "kata-pin: waiting for the daemon's answer, up to 2 s\n"
    assert (process.returncode, error.removeprefix(waited)) == (130, "")


def test_watch_without_a_number_may_stand_before_a_sandbox(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pod is not taken for the number: the error is about a pod that is not there."""
    config = str(serve(_state()))
    assert run(["show", "--watch", "nobody", "--config", config]) == 1
    assert "no sandbox 'nobody'" in capsys.readouterr().err
    assert run(["show", "--watch", "0.1", "--config", config]) == 2
    assert "0.2<=x<=3600" in capsys.readouterr().err


def _on_terminal(arguments: list[str], columns: int, **environ: str) -> str:
    """Run a command on a pseudo-terminal of so many columns and return what it wrote."""
    import fcntl
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))
    clean = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "NO_COLOR", "TERM"}}
    with subprocess.Popen(
        [sys.executable, "-m", "kata_pin.cli.main", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**clean, "LC_ALL": "C.UTF-8", **environ},
    ) as process:
        os.close(slave)
        written = b""
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not data:
                break
            written += data
        process.wait(20)
    os.close(master)
    return written.decode()


def test_a_terminal_gets_colours_and_its_width(serve: Serve) -> None:
    """On a terminal of 60 columns lines fit and drift is red; NO_COLOR and TERM=dumb switch off."""
    arguments = ["show", "--config", str(serve(_state()))]
    coloured = _on_terminal(arguments, 60, TERM="xterm-256color")
    assert "\x1b[1;31m" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert max(map(len, plain.splitlines())) <= 60
    for quiet in ({"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert _on_terminal(arguments, 60, **quiet) == plain


def test_an_ascii_output_gets_ascii_signs(serve: Serve) -> None:
    """Where stdout cannot encode an arrow, ASCII stands for it and names are escaped."""
    config = serve(_state(docs.foreign()))
    done = subprocess.run(
        [sys.executable, "-m", "kata_pin.cli.main", "show", "--config", str(config)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
        timeout=20,
    )
    text = done.stdout.decode("ascii")
    assert "0->4" in text
    assert "\\u751f" in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_program(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each shell gets a script that asks kata-pin for words."""
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_KATA_PIN_COMPLETE" in script
    assert "kata-pin" in script


def test_sandboxes_complete_while_the_daemon_runs(serve: Serve) -> None:
    """The completion of `show` offers pods and ids; without a daemon nothing, quickly."""
    config = serve(_state())
    environ = {
        **os.environ,
        "_KATA_PIN_COMPLETE": "bash_complete",
        "COMP_WORDS": f"kata-pin --config {config} show default/",
        "COMP_CWORD": "4",
    }
    code = "from kata_pin.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], env=environ, capture_output=True,
        text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["plain,default/db-0"]
    assert "kata_pin.cli.main" in done.stderr
    assert "psutil" not in done.stderr
    assert "pyroute2" not in done.stderr


def test_defaults_are_those_of_the_configuration() -> None:
    """What the command line knows without loading the settings agrees with them."""
    assert (CONFIGURATION_DEFAULT_FILE, Config().runtime_dir) == (DEFAULT_FILE, RUNTIME_DIR)


def test_a_file_damaged_since_the_start_keeps_nobody_from_asking(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """`show` needs the daemon's directory alone while the daemon answers."""
    file = serve(_state())
    file.write_text(file.read_text() + "modus: act\n")
    assert run(["show", "--config", str(file)]) == 0
    assert run(["check", "--config", str(file)]) == 78
    assert "no such setting" in capsys.readouterr().err


def test_times_of_history_do_not_reach_the_terminal_unescaped() -> None:
    """The daemon's user may have written any text there."""
    document = docs.changed()
    changes = [replace(one, time="\x1b]0;owned\x07") for one in document.changes]
    events = [NodeEvent("\x1b[2J", 1.0, NodeEventKind.RELOADED, "text")]
    for changed in (
        replace(document, changes=tuple(changes)),
        replace(document, events=tuple(events)),
    ):
        shown = "".join(line.plain for line in reports.history(changed, Output(NO_LIMIT)))
        assert "\x1b" not in shown
        assert "\\x1b" in shown


RUN = "import sys; from kata_pin.cli.main import run; sys.exit(run(sys.argv[1:]))"


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("command", "title"),
    [
        ("install --root {tmp}", "installing"),
        ("uninstall --root {tmp}", "removing files"),
        ("prove --for 1s", "measuring"),
        ("release --wait 0s", "restoring affinities"),
        ("release-nodes n/d --timeout 1s --api http://127.0.0.1:1", "on all nodes"),
    ],
)
def test_long_work_shows_progress_on_a_terminal_only(
    tmp_path: Path, command: str, title: str, *, terminal: bool
) -> None:
    """On stderr, and only where that is a terminal; stdout has the result alone."""
    ours, theirs = os.openpty() if terminal else os.pipe()
    config = tmp_path / "config.yaml"
    config.write_text(f"version: 1\nruntime_dir: {tmp_path}/run\npaths: {{vc: {tmp_path}/vc}}\n")
    words = command.format(tmp=tmp_path).split()
    done = subprocess.run(
        [sys.executable, "-c", RUN, "--config", str(config), *words],
        stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=False,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # how a terminal ends whose other side is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert (title in shown.decode()) is terminal
    assert title not in done.stdout
    if "install" in words[0]:
        assert done.returncode == 0
        assert terminal or shown == b""
        assert words[0] == "uninstall" or "kata-pin.service" in done.stdout
