"""Agent URLs, as Kata writes them."""

from __future__ import annotations

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.peers.agent.client import (
    AgentAddress,
    HybridVsockAddress,
    VsockAddress,
    parse_address,
)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("vsock://1234567:1024", VsockAddress(1234567)),
        ("vsock://3", VsockAddress(3)),
        ("vsock://3:99", VsockAddress(3, 99)),
        (
            "hvsock:///run/vc/vm/x/clh.sock:1024",
            HybridVsockAddress("/run/vc/vm/x/clh.sock"),
        ),
        (
            "hvsock:///run/kata/x/root/kata.hvsock",
            HybridVsockAddress("/run/kata/x/root/kata.hvsock"),
        ),
    ],
)
def test_addresses(url: str, address: AgentAddress) -> None:
    """Both forms are read, the port may be left out, and what is printed is read the same."""
    assert parse_address(url) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "unix:///run/x",
        "vsock://",
        "vsock://x:1024",
        "vsock://-1:1024",
        "vsock://3:0",
        "vsock://3:4294967295",
        "vsock://3:1024\n",
        "vsock://٣:1024",
        "hvsock://run/x:1024",
        "hvsock:///run/../x:1024",
        "hvsock:///run/x\0y:1024",
        "hvsock:///" + "x" * 107,
        *(f"vsock://{cid}:1024" for cid in (0, 1, 2, 0xFFFFFFFF, 1 << 40)),
    ],
)
def test_what_is_none(url: str) -> None:
    """Texts that are no address, and those of the host itself, are refused."""
    with pytest.raises(ParseError):
        parse_address(url)
