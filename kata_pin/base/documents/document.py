"""What all documents have: their version, cpu lists, notes, and the daemon that made them."""

from typing import Annotated, Final

from msgspec import Struct

from kata_pin.base.values import NoteLevel

# One module per document; a class is one JSON object. Plain values only: CPU sets are Linux cpu
# lists, ages and durations are numbers. The comment at a field (`#:`) is its description in
# docs/json.md and docs/schema/, which scripts/schema generates. A field with a closed list of
# values has their type, an enum of base/values.py or a Literal, from which the schema lists them.
# service/protocol.py encodes and decodes the classes.
#
# The modules whose documents commands read most do without `from __future__ import annotations`:
# msgspec compiles each annotation that is a text when it first needs it, 2 ms of every `show`.

VERSION: Final = 2
"""Version of every document. Within a version fields and values are only added."""

Cpus = Annotated[str, "cpus"]
"""A Linux cpu list such as `0-3,8`; empty: no CPU."""


class Document(Struct, frozen=True, kw_only=True):
    """What every document begins with."""

    version: int = VERSION  #: version of the document


class Note(Struct, frozen=True):
    """Something the operator should know."""

    code: str  #: stable name of the condition
    text: str  #: the same for people
    level: NoteLevel  #: how much it matters


# The daemon's part of a document: whether it made the document, and its connections.

UNWRITTEN: Final = "registry-unwritten"
"""The code of the node's note about a registry that cannot be written."""


class Nri(Struct, frozen=True):
    """The connection to the container runtime's NRI."""

    socket: str  #: the runtime's NRI socket
    runtime: str  #: name and version of the runtime while connected, else empty
    connected_s: float | None  #: time since synchronisation ended; null: not connected
    problem: str  #: why not connected; empty while connected


class Metrics(Struct, frozen=True):
    """The endpoint that serves metrics."""

    address: str  #: `unix:` and a path, or a URL
    problem: str  #: why nothing is served there; empty while serving


class RefusedReload(Struct, frozen=True):
    """A configuration that was wrong when it was read again; the former one is in force."""

    time: str  #: when it was read
    error: str  #: what is wrong with it


class Daemon(Struct, frozen=True):
    """Whether the daemon made the document."""

    running: bool  #: false: the command itself read /proc
    reason: str = ""  #: why the daemon was not used; empty if running
    pid: int | None = None  #: null if not running
    version: str = ""  #: the daemon's version; empty if not running
    uptime_s: float | None = None  #: null if not running
    nri: Nri | None = None  #: null: NRI is disabled, or the daemon is not running
    metrics: Metrics | None = None  #: null: metrics are disabled, or the daemon is not running
    silent: bool = False  #: true: a daemon accepts connections but does not answer; restart it
    refused: RefusedReload | None = None  #: the newest reload, if it was refused
