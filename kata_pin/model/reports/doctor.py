"""The doctor document: this node's prerequisites."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION


@dataclass(frozen=True, slots=True)
class Row:
    """One check of a prerequisite."""

    check: str  #: what was checked
    status: str  #: One of `ok`, `info`, `warn`, `fail`
    text: str  #: what was found
    remedy: str = ""  #: what helps
    sandbox: str = ""  #: pod or id of the sandbox; empty: about the node


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorDocument:
    """Printed by `doctor`."""

    version: int = VERSION  #: version of the document
    kind: str = "doctor"  #: kind of the document
    ok: bool  #: false: exit status 1
    rows: tuple[Row, ...]  #: one object per check
