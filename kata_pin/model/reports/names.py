"""The names of the sandboxes: what a command needs to know which one is meant."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION


@dataclass(frozen=True, slots=True)
class SandboxName:
    """A sandbox's id and its pod."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The daemon's answer to `names`; no command prints it."""

    version: int = VERSION  #: version of the document
    kind: str = "names"  #: kind of the document
    sandboxes: tuple[SandboxName, ...]  #: one object per sandbox
