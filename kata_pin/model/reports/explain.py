"""The explain document: why a sandbox's threads are where they are."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Printed by `explain`."""

    version: int = VERSION  #: version of the document
    kind: str = "explain"  #: kind of the document
    sandbox: str  #: sandbox id
    lines: tuple[str, ...]  #: text for people: section titles, and indented lines below them
