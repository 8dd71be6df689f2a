"""The settings of metrics: the section `metrics`.

Served nowhere, on a unix socket, or on a port of the loopback device. Another address is refused:
metrics name the node's CPUs and, by setting, its pods, and the daemon is root's. Out of scope:
serving (daemon/status/scrape.py).
"""

# ruff: noqa: RUF009 - setting() makes a dataclass field, it is not a default shared by instances

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kata_pin.config.kinds import Kind, Raw, integer, text_of
from kata_pin.config.row import setting
from kata_pin.errors import ParseError

_PLACE: Final = re.compile(r"(\[[0-9a-fA-F:.]{1,45}\]|[^:\[\]]{1,253}):([0-9]{1,5})\Z")
_LOOPBACK: Final = re.compile(r"127(\.(0|[1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|25[0-5])){3}\Z")
_WORDS: Final = "none, unix or a loopback address with a port such as 127.0.0.1:9753"


class EndpointKind(StrEnum):
    """What is listened on."""

    NONE = "none"
    UNIX = "unix"
    TCP = "tcp"


@dataclass(frozen=True)
class Endpoint:
    """One endpoint; `host` and `port` are those of a TCP one."""

    kind: EndpointKind = EndpointKind.UNIX
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.kind is not EndpointKind.TCP:
            return self.kind.value
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _read(raw: Raw) -> Endpoint:
    text = text_of(raw)
    if text in {EndpointKind.NONE, EndpointKind.UNIX}:
        return Endpoint(EndpointKind(text))
    found = _PLACE.match(text)
    if found is None:
        raise ParseError(f"expected {_WORDS}", text=text or "(nothing)")
    host, port = found[1], int(found[2])
    if host != "[::1]" and _LOOPBACK.match(host) is None:
        raise ParseError("not a loopback address (127.0.0.1 or [::1])", text=host)
    if not 1 <= port <= 65535:
        raise ParseError("not a port from 1 to 65535", text=found[2])
    return Endpoint(EndpointKind.TCP, host.strip("[]"), port)


ENDPOINT: Final = Kind(_WORDS, _read, str)


@dataclass(frozen=True)
class Metrics:
    """What Prometheus may ask."""

    listen: Endpoint = setting(
        ENDPOINT,
        Endpoint(),
        "where /metrics is served. unix: metrics.sock in runtime_dir, for the same group as the "
        "state; a loopback port: for whoever can reach it; none: nowhere",
        example="127.0.0.1:9753",
    )
    sandboxes: int = setting(
        integer(0, 1000),
        0,
        "most sandboxes that get a series of their own, which names their pods; 0: none does",
    )
