"""What is read of the API server and of our own token."""

from __future__ import annotations

import base64
import json

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.options.cluster.values import (
    MAX_TOKEN,
    TokenClaims,
    is_object_name,
    parse_refusal,
    parse_series,
    parse_token,
)


def token(payload: object) -> bytes:
    """Return an unsigned token, as base64url has it: without padding."""
    part = base64.urlsafe_b64encode(json.dumps(payload).encode()).rstrip(b"=")
    return b"e30." + part + b".c2ln\n"


BOUND = {
    "kubernetes.io": {
        "namespace": "kp", "node": {"name": "n1", "uid": "u~?>"}, "pod": {"name": "p"},
    }
}  # fmt: skip


def test_a_bound_token() -> None:
    """Node and pod are known; a token that is bound to nothing says nothing."""
    assert parse_token(token(BOUND)) == TokenClaims("n1", "u~?>", "kp/p")
    assert parse_token(token({"sub": "x"})) == TokenClaims()
    assert parse_token(token({"kubernetes.io": {"node": None}})) == TokenClaims()


@pytest.mark.parametrize(
    "data",
    [b"", b"a.b", b"a.b.c.d", b"e30.!!.x", b"e30.bm9wZQ.x", token([]), token({"kubernetes.io": 1}),
     token({"kubernetes.io": {"node": {"name": "n" * 300}}}), b"a." + b"A" * MAX_TOKEN + b".c"],
)  # fmt: skip
def test_what_is_no_token(data: bytes) -> None:
    """Each is a ParseError."""
    with pytest.raises(ParseError):
        parse_token(data)


def test_refusals() -> None:
    """A Status has a message; anything else has none."""
    assert parse_refusal(b'{"kind": "Status", "message": "a\\u001bb"}') == "a b"
    assert len(parse_refusal(json.dumps({"kind": "Status", "message": "x" * 999}).encode())) == 300
    for data in (b"", b"<html>", b'{"kind": "Pod", "message": "x"}', b'{"kind": "Status"}', b"[]"):
        assert parse_refusal(data) == ""


def test_series() -> None:
    """An Event without a series happened once."""
    assert parse_series(b'{"series": {"count": 3}}') == 3
    assert parse_series(b"{}") == parse_series(b'{"series": null}') == 1
    for data in (b"", b'{"series": {"count": -1}}', b'{"series": {"count": "1"}}'):
        with pytest.raises(ParseError):
            parse_series(data)


def test_names() -> None:
    """Names of objects are subdomains; nothing else gets into a path."""
    assert all(map(is_object_name, ("a", "node-1.example", "0")))
    assert not any(map(is_object_name, ("", "A", "a/b", "-a", "a.", "a\n", "..", "a" * 254)))
