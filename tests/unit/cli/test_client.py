"""Where documents come from: sockets that answer, refuse, stall or are not there."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kata_pin.base.config.table import sample
from kata_pin.base.config.tree import Config
from kata_pin.base.documents.answers import Names, SandboxName
from kata_pin.base.documents.document import Daemon
from kata_pin.base.documents.state import State
from kata_pin.base.errors import ConfigError, DaemonError, RemoteProtocolError
from kata_pin.cli.client import Provider
from kata_pin.cli.quick import RUNTIME_DIR
from kata_pin.cli.session import Session
from kata_pin.service.exchange import DaemonAway, DaemonSilent
from kata_pin.service.protocol import ask
from tests.support.commandline import run
from tests.unit.cli import documents as docs
from tests.unit.conftest import Serve, given, plain


@contextmanager
def listener(path: Path, reply: bytes | None) -> Iterator[None]:
    """Listen on a path; send `reply` to the first client, or nothing at all if it is None."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(4)
        if reply is None:
            yield
            return

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            thread.join(5)


def test_no_socket_means_no_daemon(tmp_path: Path) -> None:
    """A missing socket, and one that a dead daemon left, are both `away`."""
    path = tmp_path / "control.sock"
    with pytest.raises(DaemonAway, match="no daemon is listening on"):
        ask(str(path), "state", {}, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with pytest.raises(DaemonAway):
        ask(str(path), "state", {}, 1)


def test_a_daemon_that_hangs_costs_the_deadline_only(tmp_path: Path) -> None:
    """A listener that never answers is `silent` after the deadline."""
    path = tmp_path / "control.sock"
    with listener(path, None):
        started = time.monotonic()
        with pytest.raises(DaemonSilent, match=r"did not answer on .* within 0\.2 s"):
            ask(str(path), "state", {}, 0.2)
        assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"", "closed the connection before it answered"),
        (b'{"version":1,"ok":true', "closed the connection before it answered"),
        (b"[]\n", "reply"),
        (b'{"version":1,"ok":true}\n', "document has version 0"),
        (b'{"version":1,"ok":true,"document":3}\n', "document is not a State"),
        (b'{"version":1,"ok":true,"document":{"version":2}}\n', "document is not a State"),
        (b'{"version":9,"ok":true,"document":{}}\n', "version 9"),
    ],
)
def test_answers_that_break_the_protocol(tmp_path: Path, reply: bytes, words: str) -> None:
    """A cut, foreign or empty answer is a protocol error, not a crash."""
    path = tmp_path / "control.sock"
    with listener(path, reply), pytest.raises(RemoteProtocolError, match=words):
        Provider(given(Config(runtime_dir=str(tmp_path)))).state()


def test_a_refusal_carries_error_and_hint(tmp_path: Path) -> None:
    """`ok: false` is a DaemonError with both texts."""
    path = tmp_path / "control.sock"
    reply = b'{"version":1,"ok":false,"error":"no","hint":"try"}\n'
    with listener(path, reply), pytest.raises(DaemonError) as caught:
        ask(str(path), "pin", {}, 5)
    assert (caught.value.message, caught.value.hint) == ("no", "try")


def test_a_large_answer_is_read_whole(serve: Serve, tmp_path: Path) -> None:
    """The document of a big node arrives complete."""
    serve({"state": lambda _: docs.large()})
    assert plain(Provider(given(Config(runtime_dir=str(tmp_path)))).state()) == plain(docs.large())


@pytest.mark.root
def test_no_permission_is_told_apart_from_no_daemon(tmp_path: Path) -> None:
    """A user who may not connect is told so; /proc is not read with too few rights instead."""
    path = tmp_path / "status.sock"
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    with listener(path, None):
        path.chmod(0o600)
        pid = os.fork()
        if pid == 0:  # the child is another user and exits with what it found
            os.setgid(65534)
            os.setuid(65534)
            try:
                ask(str(path), "state", {}, 1)
            except DaemonAway:
                os._exit(1)
            except DaemonError as error:
                os._exit(0 if "no permission" in error.message else 2)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_writing_does_not_bypass_a_daemon_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pins are not set beside a daemon that is there: two writers must not race."""
    monkeypatch.setattr("kata_pin.cli.client.WRITE_S", 0.2)  # the real deadline is 35 s
    provider = Provider(given(Config(runtime_dir=str(tmp_path))))
    with listener(tmp_path / "control.sock", None), pytest.raises(DaemonSilent):
        provider.change("pin", None)


def test_reading_without_a_daemon_looks_at_the_system(tmp_path: Path) -> None:
    """The state is made in this process then, and says why."""
    config = Config(runtime_dir=str(tmp_path / "absent"))
    state = Provider(given(config)).state()
    reason = f"no daemon is listening on {tmp_path}/absent/status.sock"
    assert state.daemon == Daemon(running=False, reason=reason)
    assert state.node.cpus
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("name", "verbs"),
    [
        ("default/db-0", ["state"]),
        ("db-0", ["state", "names", "state"]),
        (None, ["state"]),
    ],
)
def test_a_whole_name_needs_one_request(
    name: str | None, verbs: list[str], serve: Serve, tmp_path: Path
) -> None:
    """The daemon knows ids and pods; parts of them are the command's business."""
    asked = []

    def state(_: object) -> State:
        asked.append("state")
        return docs.state(docs.database())

    def names(_: object) -> Names:
        asked.append("names")
        return Names(sandboxes=(SandboxName(docs.database().id, "default/db-0"),))

    serve({"state": state, "names": names})
    found = Provider(given(Config(runtime_dir=str(tmp_path)))).state_of(name)
    assert [one.pod for one in found.sandboxes] == ["default/db-0"]
    assert asked == verbs


def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits: the real ones are 0.5 s, 2 s and 35 s."""
    monkeypatch.setattr("kata_pin.service.exchange.PATIENCE_S", 0.05)
    for name in ("READ_S", "WRITE_S"):
        monkeypatch.setattr(f"kata_pin.cli.client.{name}", 0.3)


def test_waiting_for_a_daemon_that_hangs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First that it waits, then that it goes on without the daemon; it is asked once.

    The state is read again all the same: `prove` compares it before and after.
    """
    _impatient(monkeypatch)
    session = Session(str(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").write_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    with listener(tmp_path / "status.sock", None):
        session.connect().names()
        state, again = session.connect().state(), session.connect().state()
    assert (state.daemon.running, state.daemon.silent) == (False, True)
    assert again is not state
    assert again.node is not state.node
    waiting, silent, hint = capsys.readouterr().err.splitlines()
    assert waiting == "kata-pin: waiting for the daemon's answer, up to 0.3 s"
    assert silent.endswith("status.sock within 0.3 s; continuing without it")
    assert "systemctl restart kata-pin" in hint


def test_a_daemon_that_hung_is_asked_again_later(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`top` runs for long: a daemon that was restarted meanwhile is used again."""
    _impatient(monkeypatch)
    monkeypatch.setattr("kata_pin.cli.client.AGAIN_S", 0.0)
    provider = Provider(given(Config(runtime_dir=str(tmp_path))))
    path = tmp_path / "status.sock"
    with listener(path, None):
        assert not provider.state().daemon.running
    path.unlink()
    serve({"state": lambda _: docs.state()})
    assert provider.state().daemon.running


def test_a_user_whom_the_daemon_does_not_serve_learns_who_may(tmp_path: Path) -> None:
    """It closes such a connection at once, which is no answer and no absence."""
    path = tmp_path / "status.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(1)

        def refuse() -> None:
            peer, _ = server.accept()
            peer.recv(1)  # the rest is unread: closing resets the connection
            peer.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(DaemonError, match="closed the connection") as caught:
            ask(str(path), "state", {}, 5)
        thread.join(5)
    assert "run as root, or join group" in caught.value.hint


@pytest.mark.parametrize("arguments", [["prove"], ["prove", "web"]])
def test_what_prove_cannot_measure_is_unproved(tmp_path: Path, arguments: list[str]) -> None:
    """The exit status is 4, as of a measurement that is not whole, not that of any error."""
    (tmp_path / "config.yaml").write_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    reply = b'{"version":1,"ok":false,"error":"no","hint":"try"}\n'
    with listener(tmp_path / "status.sock", reply):
        assert run([*arguments, "--for", "1s", "--config", str(tmp_path / "config.yaml")]) == 4


def test_a_daemon_that_answers_is_not_waited_for_in_words(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ordinary answers leave stderr empty."""
    serve({"state": lambda _: docs.state()})
    Provider(given(Config(runtime_dir=str(tmp_path)))).state()
    assert capsys.readouterr().err == ""


def test_changing_one_sandbox_finds_a_daemon_that_hangs_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pin POD` neither reads names without the daemon nor sets anything beside it."""
    _impatient(monkeypatch)
    provider = Provider(given(Config(runtime_dir=str(tmp_path))))
    with listener(tmp_path / "control.sock", None):
        for name in ("web", None):
            with pytest.raises(DaemonSilent, match="did not answer"):
                provider.change("pin", name)
    assert "continuing without it" not in capsys.readouterr().err


def test_work_without_the_daemon_does_not_log_to_the_terminal(tmp_path: Path) -> None:
    """What the daemon would log is in the documents; --debug shows it."""
    config = tmp_path / "config.yaml"
    config.write_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    code = (
        "import logging, sys; from kata_pin.service import offline; real = offline.state\n"
        "def state(config):\n"
        "    logging.getLogger('kata_pin.vmm').warning('told'); return real(config)\n"
        "offline.state = state; from kata_pin.cli.main import run; sys.exit(run(sys.argv[1:]))"
    )
    for options, told in (([], False), (["--debug"], True)):
        done = subprocess.run(
            [sys.executable, "-c", code, "show", "--config", str(config), *options],
            capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
        assert ("told" in done.stderr) is told


def test_check_says_when_it_could_not_tell(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that this user cannot see: status 4, never "ok"."""
    config = str(serve({"state": lambda _: docs.state(docs.database())}))
    with monkeypatch.context() as patched:
        patched.setattr("kata_pin.cli.reports.who.why_hidden", lambda: "hidden from this user")
        assert run(["check", "--json", "--config", config]) == 4
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["verdict"], told["unknown"]) == (
        False, "unknown", ["hidden from this user"],
    )  # fmt: skip


def test_unexpected_errors_are_told_without_a_traceback(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug is one line that asks for --debug; --debug shows the traceback."""
    monkeypatch.setattr("kata_pin.cli.render.show.overview", lambda *_: next(iter(())))
    config = str(serve({"state": lambda _: docs.state()}))
    assert run(["show", "--config", config]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kata-pin: unexpected StopIteration: ")
    assert "Traceback" not in error
    assert run(["--debug", "show", "--config", config]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_page_is_only_replaced_by_a_whole_one(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of `prove --html` keeps the former page."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kata_pin.cli.reports.prove.prove", interrupted)
    page = tmp_path / "page.html"
    page.write_text("the former one")
    config = str(serve({"state": lambda _: docs.state()}))
    assert run(["prove", "--html", str(page), "--config", config]) == 130
    assert page.read_text() == "the former one"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("version: 1\nruntime_dir: /run/a  # here\n", "/run/a"),
        ("version: 1\nruntime_dir: '/run/b c'\n", "/run/b c"),
        ("{version: 1, runtime_dir: /run/c}\n", "/run/c"),
        ("version: 1\n# runtime_dir: /run/d\n", RUNTIME_DIR),
        ("version: 1\nruntime_dir: /run/e#1\n", "/run/e#1"),
        ("version: 1\n", RUNTIME_DIR),
    ],
)
def test_the_runtime_directory_is_found_without_yaml_where_possible(
    tmp_path: Path, text: str, found: str
) -> None:
    """Any correct file gives the same as the whole configuration."""
    file = tmp_path / "k.yaml"
    file.write_text(text)
    session = Session(str(file))
    assert session.runtime_dir == session.config.runtime_dir == found


def test_a_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    """Nobody writes to it, so opening it would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        _ = Session(str(tmp_path / "pipe")).runtime_dir


def test_the_sample_file_is_not_read_as_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`install` writes it: all of its lines on the runtime directory are comments."""
    file = tmp_path / "k.yaml"
    file.write_text(sample())
    monkeypatch.delattr(Session, "config")
    assert Session(str(file)).runtime_dir == RUNTIME_DIR
