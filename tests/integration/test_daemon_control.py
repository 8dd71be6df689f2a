"""The sockets under fire: garbage, floods, slow and foreign clients disturb nobody else."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kata_pin.service.exchange import MAX_REQUEST
from tests.support.commandline import run
from tests.support.daemon import Json, Node, Refused, private_node

pytestmark = [pytest.mark.root]

SOMEBODY = 4242
NOGROUP = 65534
AT_ONCE_S = 1.0
ACTING = ("pin", "unpin", "bind", "reconcile", "reload", "release")


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """One daemon for all: what one test does must not disturb the next."""
    with private_node() as one:
        one.start()
        yield one


@pytest.fixture
def own_node() -> Iterator[Node]:
    with private_node() as one:
        yield one


@contextlib.contextmanager
def client(node: Node, name: str = "control.sock") -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(str(node.runtime_dir / name))
        yield peer


def _request(verb: str, **arguments: object) -> bytes:
    return json.dumps({"version": 1, "verb": verb, **arguments}).encode() + b"\n"


def _reply(peer: socket.socket) -> Json:
    with peer.makefile("rb") as stream:
        reply: Json = json.loads(stream.readline())
        return reply


def _answers_at_once(node: Node) -> None:
    started = time.monotonic()
    assert node.ask("ping") == {}
    assert time.monotonic() - started < AT_ONCE_S


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"\n", id="empty line"),
        pytest.param(b"\0\xff\xfe\n", id="bytes"),
        pytest.param(b"{}\n", id="no version"),
        pytest.param(b'{"version":2,"verb":"ping"}\n', id="another version"),
        pytest.param(b'{"version":1,"verb":["ping"]}\n', id="verb is a list"),
        pytest.param(b"[" * 60000 + b"\n", id="deep nesting"),
        pytest.param(b"x" * 200_000, id="endless line"),
        pytest.param(b'{"version":1,"verb":"' + b"v" * 60000 + b'"}\n', id="endless verb"),
    ],
)
def test_garbage_ends_only_its_own_connection(node: Node, garbage: bytes) -> None:
    """Whatever is sent, that client is dropped or told, and the next one is served at once."""
    with client(node) as peer:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(garbage)
            peer.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            answer = peer.recv(65536)
            assert answer == b"" or not json.loads(answer)["ok"]
    _answers_at_once(node)
    assert "Traceback" not in node.log


def test_unknown_verbs_and_sandboxes_are_told(node: Node) -> None:
    """A request that cannot be granted is answered with the reason and a hint."""
    with pytest.raises(
        Refused, match=r"unknown verb 'dance' .*this socket knows bind, config, explain, "
    ):
        node.ask("dance")
    for verb in ("explain", "pin", "unpin", "reconcile"):
        for name in ("nobody", "../../etc", "x" * 1000, "\n\x1b[31m"):
            with pytest.raises(Refused, match="no sandbox"):
                node.ask(verb, sandbox=name)
    with pytest.raises(Refused):
        node.ask("explain", sandbox=7)


def test_several_requests_on_one_connection(node: Node) -> None:
    """Requests that come together, or a byte at a time, are answered in their order."""
    with client(node) as peer:
        for byte in _request("ping"):
            peer.sendall(bytes([byte]))
        assert _reply(peer)["ok"]
        peer.sendall(_request("ping") + _request("dance") + _request("ping"))
        stream = peer.makefile("rb")
        assert [json.loads(stream.readline())["ok"] for _ in range(3)] == [True, False, True]


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_longest_request(node: Node, beyond: int) -> None:
    """64 KiB with its newline are read; a line of one byte more ends the connection."""
    head, tail = b'{"version":1,"verb":"ping","more":"', b'"}\n'
    line = head + b"x" * (MAX_REQUEST + beyond - len(head) - len(tail)) + tail
    with client(node) as peer:
        peer.sendall(line)
        with contextlib.suppress(ConnectionResetError):
            assert (b'"ok":true' in peer.recv(65536)) == (not beyond)


def test_forty_clients_and_idle_ones(node: Node) -> None:
    """Of forty at once each is served or told to come again; idle ones free their place."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(client(node)) for _ in range(40)]
        for peer in peers:
            with contextlib.suppress(BrokenPipeError):  # turned away already
                peer.sendall(_request("ping"))
        replies = [_reply(peer) for peer in peers]
        turned_away = [one for one in replies if not one["ok"]]
        assert all(one["error"] == "too many clients" for one in turned_away)
        assert len(turned_away) == 8
        # the other socket has places of its own
        with client(node, "status.sock") as other:
            other.sendall(_request("ping"))
            assert _reply(other)["ok"]
    _answers_at_once(node)


def test_a_slow_client_is_dropped(node: Node) -> None:
    """A client that sends half a request loses its connection after the deadline."""
    with client(node) as peer:
        peer.sendall(b'{"version":1,')
        started = time.monotonic()
        assert peer.recv(1) == b""
        assert 4 < time.monotonic() - started < 8
    _answers_at_once(node)


def test_a_client_that_takes_no_reply_holds_nobody_up(node: Node) -> None:
    """A client that floods requests and reads nothing costs the others no time."""
    with client(node) as peer:
        peer.setblocking(False)
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while True:
                peer.send(_request("state") * 100)
        for _ in range(5):
            _answers_at_once(node)


@pytest.mark.parametrize("verb", ACTING)
def test_status_socket_refuses_acting_verbs(node: Node, verb: str) -> None:
    """The group's socket knows the reading verbs only."""
    with client(node, "status.sock") as peer:
        peer.sendall(_request(verb))
        reply = _reply(peer)
        assert not reply["ok"]
        assert f"unknown verb {verb!r}" in reply["error"]
        known = "config, explain, findings, history, names, option, ping, state, watch"
        assert reply["hint"] == f"this socket knows {known}"


_CLIENT = """
import json, socket, sys
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
peer.sendall(sys.argv[2].encode())
print(peer.makefile().readline(), end="")
"""


def _as_user(uid: int, gid: int, path: Path, request: bytes) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _CLIENT, str(path), request.decode()],
        user=uid,
        group=gid,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )


@pytest.mark.parametrize("name", ["control.sock", "hook.sock"])
def test_another_user_cannot_connect(own_node: Node, name: str) -> None:
    """The sockets' modes keep other users out; even past them the kernel's word does."""
    node = own_node
    node.start()
    path = node.runtime_dir / name
    for folder in (node.root, node.runtime_dir):
        folder.chmod(0o755)
    request = _request("ping") if name == "control.sock" else b"KP1 poststart 1 1 2\n{}"
    assert "PermissionError" in _as_user(SOMEBODY, SOMEBODY, path, request).stderr
    path.chmod(0o666)  # as if a mode were wrong
    done = _as_user(SOMEBODY, SOMEBODY, path, request)
    assert done.stdout == ""
    assert f"uid {SOMEBODY}" in node.log
    _answers_at_once(node)


@pytest.mark.parametrize("name", ["control.sock", "hook.sock"])
def test_the_daemons_own_user_is_not_believed(own_node: Node, name: str) -> None:
    """The daemon's user owns the sockets and can connect, but it may be shared: it is refused."""
    node = own_node
    node.start()
    path = node.runtime_dir / name
    owner = path.stat()
    assert owner.st_uid not in {0, SOMEBODY}
    request = _request("ping") if name == "control.sock" else b"KP1 poststart 1 1 2\n{}"
    assert f"uid {owner.st_uid}" not in node.log
    done = _as_user(owner.st_uid, owner.st_gid, path, request)
    assert done.stdout == ""
    assert "PermissionError" not in done.stderr
    assert f"uid {owner.st_uid}" in node.log
    _answers_at_once(node)


def test_runtime_directory_and_sockets_are_private(node: Node) -> None:
    """Directory, spool and sockets have the modes that keep other users out."""
    mode = {p.name: p.stat().st_mode & 0o777 for p in node.runtime_dir.iterdir()}
    assert node.runtime_dir.stat().st_mode & 0o007 == 0
    assert mode["spool"] == 0o700
    assert mode["registry.db"] == mode["control.sock"] == mode["hook.sock"] == 0o600


def test_group_members_may_read_but_not_act(own_node: Node) -> None:
    """The configured group's members connect to status.sock, and to no other."""
    node = own_node
    node.configure(group="nogroup")
    node.start()
    for folder in (node.root, node.runtime_dir):
        folder.chmod(0o755)
    status, control = node.runtime_dir / "status.sock", node.runtime_dir / "control.sock"
    done = _as_user(SOMEBODY, NOGROUP, status, _request("state"))
    assert json.loads(done.stdout)["ok"], done.stderr
    refused = _as_user(SOMEBODY, NOGROUP, status, _request("release"))
    assert not json.loads(refused.stdout)["ok"]
    assert "PermissionError" in _as_user(SOMEBODY, NOGROUP, control, _request("ping")).stderr
    assert "PermissionError" in _as_user(SOMEBODY, SOMEBODY, status, _request("ping")).stderr
    assert os.stat(status).st_mode & 0o777 == 0o660


def test_check_tells_nobody_that_it_could_not_tell(own_node: Node) -> None:
    """A user without rights gets exit status 4, with a daemon and without; root gets 0 and 4."""
    node = own_node
    daemon = node.start()
    assert node.cli("check").returncode == 0
    node.root.chmod(0o755)
    node.config.chmod(0o644)
    check = ["check", "--config", str(node.config)]
    assert run(check) == 0  # a child without rights may be unable to import what this imports

    def as_nobody() -> int:
        child = os.fork()
        if not child:
            try:
                os.setgroups([])
                os.setgid(NOGROUP)
                os.setuid(NOGROUP)
                os._exit(run(check))
            finally:
                os._exit(99)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert as_nobody() == 4
    daemon.kill()
    assert node.cli("check").returncode == 4
    assert run(check) == 4
    assert as_nobody() == 4


def test_a_daemon_that_hangs_costs_two_seconds_and_is_named(own_node: Node) -> None:
    """Reading goes on without it and says so at once; doctor says restart; nothing is set."""
    node = own_node
    with node.start().hung():
        shown = node.cli("show")
        refused = node.cli("pin")
        doctor = node.cli("doctor", "--json")
        checked = node.cli("check")
    assert checked.returncode == 4
    assert "unknown: the daemon hangs, state read from /proc" in checked.stdout
    assert shown.returncode == 0
    assert shown.stderr.startswith("kata-pin: waiting for the daemon's answer, up to 2 s\n")
    assert "daemon hangs, state read from /proc" in shown.stdout
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "did not answer" in refused.stderr
    (row,) = (one for one in json.loads(doctor.stdout)["rows"] if one["check"] == "daemon")
    assert row["remedy"] == "systemctl restart kata-pin"
    _answers_at_once(node)
