"""The first command of the README does what the README says."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.demo import stage
from tests.demo.proof import Proof
from tests.demo.stage import Stage
from tests.support.qemu import Accelerator

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "scripts/demo"
ENDED = "Nothing was left behind"


@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.parametrize("arguments", [[], ["--tcg"]], ids=["as detected", "without KVM"])
def test_the_demo_holds_all_its_claims(arguments: list[str]) -> None:
    """scripts/demo ends with success, says how much it read back, and names no failure."""
    done = subprocess.run(
        [DEMO, *arguments], capture_output=True, text=True, check=False, timeout=390
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "0 failed" in done.stdout
    assert ENDED in done.stdout


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_printed_at_once(option: str) -> None:
    """It names every option, and needs neither root nor the set-up."""
    done = subprocess.run(
        [DEMO, option], capture_output=True, text=True, check=True, timeout=5, user=65534
    )
    assert all(f"  {one} " in done.stdout for one in ("--hold", "--tcg", "--help"))


def test_an_unknown_option_is_wrong_usage() -> None:
    """Nothing is played for a typo."""
    done = subprocess.run([DEMO, "--hodl"], capture_output=True, text=True, check=False, timeout=5)
    assert done.returncode == 2
    assert "unknown option --hodl" in done.stderr


def commands_of_the_readme() -> list[list[str]]:
    """Return the commands that README shows and that any node can answer.

    `bind` is named there without its options.
    """
    text = (ROOT / "README.md").read_text()
    shown = re.findall(r"^ {4}(?:\$ )?(kata-pin [^#\n]+)|`(kata-pin [^`(]+)`", text, re.MULTILINE)
    found = [shlex.split("".join(one))[1:] for one in shown]
    return [one for one in found if one[0] not in {"install", "uninstall", "bind"}]


@contextmanager
def held(**streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start scripts/demo --hold; end it if the test could not."""
    with subprocess.Popen([DEMO, "--hold"], stderr=subprocess.STDOUT, **streams) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


@pytest.mark.timeout(200)
def test_the_stage_is_kept_for_the_commands_of_the_readme() -> None:
    """Each works as README has it, with the stage's kata-pin in PATH; SIGTERM tidies up."""
    assert {"show web", "doctor"} <= {" ".join(one) for one in commands_of_the_readme()}
    with held(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as demo:
        assert demo.stdout is not None
        said, folder = "", None
        while folder is None:
            line = demo.stdout.readline().decode()
            assert line, said
            said += line
            folder = re.search(r"PATH=(\S+):\$PATH", line)
        environ = {**os.environ, "PATH": f"{folder[1]}:{os.environ['PATH']}"}
        answers = {}
        for command in commands_of_the_readme():
            shorter = ["--for", "2s"] if command == ["prove"] else []  # it takes a minute else
            done = subprocess.run(
                ["kata-pin", *command, *shorter], env=environ, capture_output=True, text=True,
                check=False, timeout=30,
            )  # fmt: skip
            fine = (
                {0, 3} if command in (["check"], ["prove"]) else {0}
            )  # others may run on the same CPUs
            assert done.returncode in fine, f"{command}: {done.stdout}{done.stderr}"
            answers[" ".join(command)] = done.stdout
        demo.send_signal(signal.SIGTERM)
        rest = demo.stdout.read().decode()
    assert "paired with exclusive CPUs of container app" in answers["show web"]
    assert demo.returncode == 0
    assert ENDED in rest
    assert not Path(folder[1]).exists()


@pytest.mark.alone
@pytest.mark.timeout(200)
def test_on_a_terminal_the_stage_has_a_shell() -> None:
    """kata-pin is the stage's there; leaving the shell ends the demo."""
    master, slave = pty.openpty()
    with held(
        stdin=slave, stdout=slave, env={**os.environ, "SHELL": "/bin/sh", "TERM": "dumb"}
    ) as demo:
        os.close(slave)
        said, typed = b"", b"kata-pin show web; kata-pin who 0 >/dev/null && echo status $?; exit\n"
        while True:
            try:
                said += os.read(master, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if b"ends the demo" in said and typed:
                typed = typed[os.write(master, typed) :]
    os.close(master)
    assert demo.returncode == 0, said.decode()
    assert b"pod        shop/web" in said
    assert b"\r\nstatus 0\r\n" in said
    assert ENDED.encode() in said


class Slow:
    """A sandbox of this process's threads, and a kata-pin that shows a pass when it has ended."""

    id = "web"

    def __init__(self, shown: list[dict[str, Any]]) -> None:
        self._shown = shown

    def state(self, _: str) -> dict[str, Any]:
        """Return what is shown next; the last one stays."""
        return self._shown.pop(0) if len(self._shown) > 1 else self._shown[0]

    def vcpus(self) -> dict[int, int]:
        """Return no vCPU."""
        return {}

    def tids(self) -> list[int]:
        """Return the main thread."""
        return [os.getpid()]


def _shown(state: str, *tids: int) -> dict[str, Any]:
    return {"state": state, "threads": [{"tid": tid} for tid in tids]}


def test_what_is_shown_may_lag_behind_the_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a thread is in its place some time before its pass has ended."""
    everything = os.sched_getaffinity(0)
    late = Slow([_shown("drift"), _shown("ok"), _shown("ok", os.getpid())])
    proof = Proof(late, os.getpid())
    proof.threads(late, vcpus={}, others=everything)
    assert proof.summary("0 s") == 0
    monkeypatch.setattr("tests.support.waiting.SCALE", 0.02)
    never = Slow([_shown("drift", os.getpid())])
    proof = Proof(never, os.getpid())
    proof.threads(never, vcpus={}, others=everything)
    assert proof.summary("0 s") == 1
    assert "web: shown as drift" in capsys.readouterr().out


@pytest.mark.root
def test_a_daemon_that_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one that is slow to start is."""
    scene = Stage(Accelerator.TCG)
    try:
        monkeypatch.setattr(stage, "PROGRAM", Path("/bin/false"))
        with pytest.raises(RuntimeError, match="has ended with status 1"):
            scene.start_daemon()
    finally:
        assert scene.close() == []
