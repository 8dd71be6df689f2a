"""Requests of the control protocol as the daemon reads them.

They come from any member of the daemon's group, so they are bounded like other JSON from outside
(base/json_text.py). All violations are RemoteProtocolError.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from kata_pin.base.errors import ParseError, RemoteProtocolError
from kata_pin.base.json_text import Fields, load
from kata_pin.service.exchange import MAX_REQUEST
from kata_pin.service.protocol import check_version


class Request(Struct, frozen=True):
    """One request; `arguments` are the members beside version and verb."""

    verb: str
    arguments: Mapping[str, object] = field(default_factory=dict)

    @property
    def fields(self) -> Fields:
        """The arguments with typed getters (ParseError names the argument)."""
        return Fields(dict(self.arguments), source=f"request {self.verb}")


def parse_request(line: bytes) -> Request:
    """Read a request line, with or without its newline."""
    try:
        value = load(line, source="request", limit=MAX_REQUEST, values=MAX_REQUEST)
        fields = Fields(value, source="request")
        version = fields.need("version").number("version", 0, 1 << 31)
        verb = fields.need("verb").text("verb", limit=64)
    except ParseError as error:
        raise RemoteProtocolError(str(error)) from error
    check_version("request", version or 0)
    assert isinstance(value, dict)
    arguments = {key: item for key, item in value.items() if key not in {"version", "verb"}}
    return Request(verb, arguments)
