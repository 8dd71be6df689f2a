"""The daemon's part of a document: whether it made the document, and its connections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nri:
    """The connection to the container runtime's NRI."""

    socket: str  #: the runtime's NRI socket
    runtime: str  #: name and version of the runtime while connected, else empty
    connected_s: float | None  #: time since synchronisation ended; null: not connected
    problem: str  #: why not connected; empty while connected


@dataclass(frozen=True, slots=True)
class Metrics:
    """The endpoint that serves metrics."""

    address: str  #: `unix:` and a path, or a URL
    problem: str  #: why nothing is served there; empty while serving


@dataclass(frozen=True, slots=True)
class RefusedReload:
    """A configuration that was wrong when it was read again; the former one is in force."""

    time: str  #: when it was read
    error: str  #: what is wrong with it


@dataclass(frozen=True, slots=True)
class Daemon:
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
