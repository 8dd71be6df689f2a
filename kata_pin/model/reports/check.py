"""The check document: what is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION, Cpus
from kata_pin.model.reports.daemon import Daemon
from kata_pin.model.reports.who import HostProcess


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be."""

    kind: str  #: One of `drift`, `conflict`, `intruder`, `no-vmm`, `unpinned`
    fails: bool  #: whether it makes `ok` false
    sandbox: str  #: id of the sandbox; empty: not about a sandbox
    cpus: Cpus  #: the pCPUs concerned
    text: str  #: the finding in words
    process: HostProcess | None = None  #: the intruder; null: another kind of finding


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDocument:
    """Printed by `check`."""

    version: int = VERSION  #: version of the document
    kind: str = "check"  #: kind of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon made it
    ok: bool  #: false: exit status 3
    sandboxes: int  #: number of sandboxes checked
    threads: int  #: number of threads checked
    findings: tuple[Finding, ...]  #: what was found
