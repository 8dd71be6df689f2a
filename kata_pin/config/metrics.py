"""The settings of metrics: the section `metrics`.

An address that is not a loopback one is refused: metrics name the node's CPUs and, by setting, its
pods, and the daemon runs as root. Serving is daemon/status/scrape.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kata_pin.config.kinds import Kind, Raw, expected, integer, setting, text_of
from kata_pin.errors import ParseError

_PLACE: Final = r"(\[[0-9a-fA-F:.]{1,45}\]|[^:\[\]]{1,253}):([0-9]{1,5})"
_LOOPBACK: Final = r"127(\.(0|[1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|25[0-5])){3}"
_WORDS: Final = "none, unix or a loopback address with a port such as 127.0.0.1:9753"


class EndpointKind(StrEnum):
    """Where metrics are served."""

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
    found = re.fullmatch(_PLACE, text)
    if found is None:
        raise expected(_WORDS, text)
    host, port = found[1], int(found[2])
    if host != "[::1]" and re.fullmatch(_LOOPBACK, host) is None:
        raise ParseError("not a loopback address (127.0.0.1 or [::1])", text=host)
    if not 1 <= port <= 65535:
        raise ParseError("not a port from 1 to 65535", text=found[2])
    return Endpoint(EndpointKind.TCP, host.strip("[]"), port)


ENDPOINT: Final = Kind(_WORDS, _read, str)


@dataclass(frozen=True)
class Metrics:
    """Where Prometheus metrics are served, and how detailed they are."""

    listen: Endpoint = setting(
        Endpoint(),
        "where /metrics is served. unix: metrics.sock in runtime_dir, readable by the same group "
        "as the state; a loopback port: readable by every local process; none: nowhere",
        ENDPOINT,
        example="127.0.0.1:9753",
    )
    sandboxes: int = setting(
        0,
        "most sandboxes that get a time series of their own, which names their pods; 0: none",
        integer(0, 1000),
    )
