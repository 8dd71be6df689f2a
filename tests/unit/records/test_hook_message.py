"""The hook's messages: framing, bounds, replies, spool names."""

from __future__ import annotations

import pytest

from kata_pin import hook
from kata_pin.base.errors import RemoteProtocolError
from kata_pin.peers.oci import Phase
from kata_pin.records import hooks
from kata_pin.records.hooks import HookDecoder, HookMessage
from tests.support.hooks import encode

MESSAGE = HookMessage(Phase.CREATE_RUNTIME, 123456789, 42, b'{"id":"x"}')


def test_bytes_of_a_request() -> None:
    """What the hook sends is read to the letter."""
    assert hooks.decode(b'KP1 createRuntime 123456789 42 10\n{"id":"x"}') == MESSAGE


@pytest.mark.parametrize("phase", list(Phase))
def test_round_trip(phase: Phase) -> None:
    """Every phase comes back, with an empty body too."""
    message = HookMessage(phase, 0, 1, b"")
    assert hooks.decode(encode(message)) == message


def test_identity_and_spool_name() -> None:
    """Stamp and pid are the message's identity and its file's name."""
    assert hooks.parse_spool_name(MESSAGE.spool_name) == (123456789, 42)


@pytest.mark.parametrize(
    "name",
    [
        "x.msg",
        "1-2.tmp",
        "1-2.msg.tmp",
        "01-2.msg",
        "1-0.msg",
        "1.msg",
        "-1-2.msg",
        "1-2.msg\n",
        "٣-2.msg",
        "../1-2.msg",
        "1" * 20 + "-2.msg",
    ],
)
def test_other_files_of_the_spool(name: str) -> None:
    """Anything but <stamp>-<pid>.msg is not a message."""
    assert hooks.parse_spool_name(name) is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n", "invalid hook header", id="another protocol"),
        pytest.param(b"KP2 prestart 1 2 0\n", "invalid hook header", id="another version"),
        pytest.param(b"KP1 startContainer 1 2 0\n", "unknown hook phase", id="unknown phase"),
        pytest.param(b"KP1 prestart -1 2 0\n", "invalid hook header", id="negative"),
        pytest.param(b"KP1 prestart 1 0 0\n", "invalid hook header", id="no pid"),
        pytest.param(b"KP1 prestart 01 2 0\n", "invalid hook header", id="leading zero"),
        pytest.param(b"KP1 prestart 1 2 0 \n", "invalid hook header", id="trailing space"),
        pytest.param(b"KP1  prestart 1 2 0\n", "invalid hook header", id="two spaces"),
        pytest.param(b"KP1 prestart 1 2 9999999\n", "out of bounds", id="too long a body"),
        pytest.param(b"KP1 prestart 1 9999999 0\n", "out of bounds", id="absurd pid"),
        pytest.param(b"KP1 prestart 9999999999999999999 2 0\n", "out of bounds", id="stamp"),
        pytest.param(b"K" * 128, "no hook header in the first 128", id="no newline"),
        pytest.param(b"\n", "invalid hook header", id="empty line"),
        pytest.param(b"KP1 prestart 1 2 1\nab", "1 bytes after", id="surplus"),
    ],
)
def test_violations(data: bytes, message: str) -> None:
    """Each violation ends the connection, with its reason."""
    with pytest.raises(RemoteProtocolError, match=message):
        HookDecoder().feed(data)


def test_bytes_after_the_message() -> None:
    """A second message on the same connection is a violation."""
    decoder = HookDecoder()
    assert decoder.feed(encode(MESSAGE)) == MESSAGE
    with pytest.raises(RemoteProtocolError, match="after the hook message"):
        decoder.feed(b"K")


def test_longest_body() -> None:
    """4 MiB is taken, one byte more is not."""
    message = HookMessage(Phase.PRESTART, 1, 2, b"x" * hooks.MAX_BODY)
    assert hooks.decode(encode(message)) == message
    longer = HookMessage(Phase.PRESTART, 1, 2, b"x" * (hooks.MAX_BODY + 1))
    with pytest.raises(RemoteProtocolError, match="out of bounds"):
        hooks.decode(encode(longer))


def test_a_spool_file_cut_short() -> None:
    """A file that a full disk cut is refused, wherever the cut is."""
    data = encode(MESSAGE)
    for end in range(len(data)):
        with pytest.raises(RemoteProtocolError, match="cut short"):
            hooks.decode(data[:end])


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        (hooks.RECORDED, "recorded"),
        (hooks.PINNED, "pinned"),
        (hooks.unpinned("no VMM yet"), "unpinned no VMM yet"),
        (hooks.refused("state: not JSON"), "refused state: not JSON"),
    ],
)
def test_replies(line: bytes, reply: str) -> None:
    """Each reply is one line, which the hook reads."""
    assert line.decode() == f"{reply}\n"
    if " " in reply:
        with pytest.raises(hook.Problem, match=reply):
            hook.expect("pinned", reply)
    else:
        hook.expect(reply, line.decode().rstrip())


@pytest.mark.parametrize("reason", ["a\nrecorded", "\x1b[2J", "é" * 500, "", "   "])
def test_a_reason_stays_on_its_line(reason: str) -> None:
    """A hostile reason cannot forge a second line, and is bounded."""
    line = hooks.refused(reason)
    assert line.count(b"\n") == 1
    assert len(line) <= 220
    assert line.isascii()
    assert line.startswith(b"refused ")
    assert line[len(b"refused ") :].strip()
