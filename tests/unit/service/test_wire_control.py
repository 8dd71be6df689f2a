"""The control protocol: lines, version, what every line has."""

from __future__ import annotations

import json

import pytest

from kata_pin.base.errors import DaemonError, ParseError, RemoteProtocolError
from kata_pin.service import commands, protocol


def test_request_round_trip() -> None:
    """A verb and its arguments come back, and arguments are read with types."""
    line = protocol.encode_request("unpin", {"sandbox": "s1", "n": 3})
    verb, arguments = commands.parse_request(line)
    assert (verb, arguments.text("sandbox"), arguments.number("n", 0, 9)) == ("unpin", "s1", 3)
    with pytest.raises(ParseError, match=r"^request unpin: n: not a text$"):
        arguments.text("n")


def test_reply_round_trip() -> None:
    """A yes carries members, a no becomes the error it says."""
    assert bytes(protocol.parse_reply(protocol.encode_reply(b'{"a":[1]}'))) == b'{"a":[1]}'
    with pytest.raises(DaemonError, match="no such sandbox") as caught:
        protocol.parse_reply(protocol.encode_error("no such sandbox", "kata-pin show"))
    assert caught.value.hint == "kata-pin show"


def test_a_line_is_one_line() -> None:
    """Newlines inside values are escaped, and what is no Unicode does not break it."""
    line = protocol.encode_request("x", {"a": "b\nc", "d": "\udcff"})
    assert line.count(b"\n") == 1
    assert commands.parse_request(line)[1].text("d") == "\\udcff"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "not an object"),
        (b"{}", "version: missing"),
        (b'{"version":2,"verb":"x"}', "request of version 2, this is version 1"),
        (b'{"version":true,"verb":"x"}', "version: not an integer"),
        (b'{"version":1}', "verb: missing"),
        (b'{"version":1,"verb":7}', "verb: not a text"),
        (b'{"version":1,"verb":"' + b"x" * 99 + b'"}', "verb: longer"),
        (b'{"version":1,"verb":"x","a":"' + b"x" * 65536 + b'"}', "longer than 65536"),
        (b'{"a":' * 5000, "nested too deeply|not JSON"),  # newer Pythons nest deeper
    ],
)
def test_bad_requests(line: bytes, message: str) -> None:
    """What is not a request is a violation that says why."""
    with pytest.raises(RemoteProtocolError, match=message):
        commands.parse_request(line)


@pytest.mark.parametrize(
    "line", [b'{"version":1}', b'{"version":1,"ok":1}', b'{"version":9,"ok":true}', b"no"]
)
def test_bad_replies(line: bytes) -> None:
    """What is not a reply is a violation, not a refusal."""
    with pytest.raises(RemoteProtocolError):
        protocol.parse_reply(line)


def test_a_big_reply() -> None:
    """A state with thousands of threads is taken."""
    threads = json.dumps([{"tid": n, "cpus": []} for n in range(60_000)]).encode()
    assert protocol.parse_reply(protocol.encode_reply(threads)) == threads


def test_json_is_what_the_page_says() -> None:
    """The members have the documented names."""
    assert json.loads(protocol.encode_error("e", "h")) == {
        "version": 1,
        "ok": False,
        "error": "e",
        "hint": "h",
    }
