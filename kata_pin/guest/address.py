"""The address of a guest's agent: vsock, or a VMM's unix socket that leads to vsock.

    vsock://<cid>:1024      QEMU; cid is the guest-cid of its vhost-vsock device
    hvsock://<path>:1024    Cloud Hypervisor, Firecracker, Dragonball: connect, send CONNECT 1024

These are the forms of Kata's agent URL (persist.json AgentState.URL, the shim's /agent-url);
runtime-rs omits the port. The daemon finds the address: the cid on QEMU's command line, else Kata's
state.
"""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass
from typing import Final

from kata_pin.errors import ParseError

AGENT_PORT: Final = 1024  # the port of Kata's agent (DEFAULT_AGENT_VSOCK_PORT)
FIRST_GUEST_CID: Final = 3  # 0 is the hypervisor, 1 the local machine, 2 the host (vsock(7))
LAST_GUEST_CID: Final = 0xFFFFFFFE
MAX_PATH: Final = 107  # longest path of a unix socket (unix(7)), without the final zero

_URL: Final = re.compile(r"(h?vsock)://(.+?)(?::([0-9]{1,10}))?\Z")
_NUMBER: Final = re.compile(r"[0-9]{1,10}\Z")


@dataclass(frozen=True, slots=True)
class VsockAddress:
    """A guest's cid and port; ValueError for a cid that no guest can have."""

    cid: int
    port: int = AGENT_PORT

    def __post_init__(self) -> None:
        if not FIRST_GUEST_CID <= self.cid <= LAST_GUEST_CID:
            raise ValueError(f"no guest has cid {self.cid}")

    def __str__(self) -> str:
        return f"vsock://{self.cid}:{self.port}"


@dataclass(frozen=True, slots=True)
class HybridVsockAddress:
    """A VMM's unix socket, and the guest's port behind it; ValueError for an invalid path."""

    path: str
    port: int = AGENT_PORT

    def __post_init__(self) -> None:
        if not self.path.startswith("/") or os.path.normpath(self.path) != self.path:
            raise ValueError(f"not an absolute, normalized path: {self.path!r}")
        if len(os.fsencode(self.path)) > MAX_PATH or "\0" in self.path:
            raise ValueError("too long or invalid for the path of a unix socket")

    def __str__(self) -> str:
        return f"hvsock://{self.path}:{self.port}"


AgentAddress = VsockAddress | HybridVsockAddress


def parse_address(url: str) -> AgentAddress:
    """Read an agent URL; ParseError if it is invalid, or names the host instead of a guest."""
    match = _URL.match(url[:4096])
    if match is None:
        raise ParseError("not vsock:// or hvsock://", source="agent URL", text=url)
    scheme, where, port_text = match.groups()
    port = int(port_text) if port_text else AGENT_PORT
    if not 0 < port < 0xFFFFFFFF:
        raise ParseError("invalid port", source="agent URL", text=url)
    try:
        if scheme == "hvsock":
            return HybridVsockAddress(where, port)
        if _NUMBER.match(where):
            return VsockAddress(int(where), port)
    except ValueError as error:
        raise ParseError(str(error), source="agent URL", text=url) from error
    raise ParseError("invalid cid", source="agent URL", text=url)
