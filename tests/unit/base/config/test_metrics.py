"""Where metrics may be served: nowhere, on a unix socket, on the loopback device."""

from __future__ import annotations

import pytest

from kata_pin.base.config.tree import Endpoint, EndpointKind
from kata_pin.base.errors import ConfigError
from kata_pin.service.configuration import from_text


def _listen(value: str) -> Endpoint:
    return from_text(f"version: 1\nmetrics:\n  listen: {value}\n").metrics.listen


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("none", Endpoint(EndpointKind.NONE)),
        ("unix", Endpoint(EndpointKind.UNIX)),
        ("127.0.0.1:9753", Endpoint(EndpointKind.TCP, "127.0.0.1", 9753)),
        ("127.255.0.9:1", Endpoint(EndpointKind.TCP, "127.255.0.9", 1)),
        ('"[::1]:65535"', Endpoint(EndpointKind.TCP, "::1", 65535)),
    ],
)
def test_endpoints(text: str, endpoint: Endpoint) -> None:
    """What may be written is read, and written back as it was."""
    assert _listen(text) == endpoint
    assert str(endpoint) == text.strip('"')


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0:9753", '"[::]:9753"', "192.168.0.1:9753", "localhost:9753", "127.0.0.1.evil:80",
        "127.0.0.256:80", "128.0.0.1:80", '"[::ffff:127.0.0.1]:80"', "127.1:80",
    ],
)  # fmt: skip
def test_an_address_that_others_can_reach_is_refused(text: str) -> None:
    """The error names the key and the address; a name that may mean anything is no address."""
    with pytest.raises(ConfigError, match=r"metrics\.listen.*not a loopback address"):
        _listen(text)


@pytest.mark.parametrize(
    "text", ["127.0.0.1", "9753", '""', "127.0.0.1:0", "127.0.0.1:65536", '"::1:80"', "[unix]"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    """A port is needed, and one that there is."""
    with pytest.raises(ConfigError, match=r"metrics\.listen"):
        _listen(text)
