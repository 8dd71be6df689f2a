"""Small documents of commands that write files or settings, and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kata_pin.model.reports import VERSION
from kata_pin.model.reports.daemon import RefusedReload


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDocument:
    """Printed by `policy set`, `policy unset` and `policy get`."""

    version: int = VERSION  #: version of the document
    overrides: dict[str, str]  #: the class of each pod, by `namespace/name` or sandbox id
    kind: str = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDocument:
    """Printed by `config show`."""

    version: int = VERSION  #: version of the document
    settings: dict[str, Any]  #: every setting as in a file; cpu lists and words are text
    running: bool  #: true: as the daemon has them; false: as the file has them
    refused: RefusedReload | None  #: the daemon's newest reload, if it was refused
    kind: str = "config"


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One error of a configuration file."""

    key: str  #: the setting; an entry of a list by its number; empty: the file as a whole
    line: int | None  #: its line; null: it has none
    error: str  #: what is wrong, and what is allowed
    hint: str = ""  #: what may help


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigCheckDocument:
    """Printed by `config check`; a file that cannot be read is an `error`."""

    version: int = VERSION  #: version of the document
    file: str  #: the file that was read
    ok: bool  #: false: the exit status is 78
    problems: tuple[ConfigProblem, ...]  #: one object per error
    kind: str = "config-check"


@dataclass(frozen=True, slots=True)
class FileChange:
    """What happened to one file."""

    verb: str  #: One of `wrote`, `removed`, `unchanged`, `kept`
    path: str  #: its path on the node
    reason: str = ""  #: why it was kept


@dataclass(frozen=True, slots=True)
class FilesDocument:
    """Printed by `install` and `uninstall`."""

    kind: str  #: One of `install`, `uninstall`
    changes: tuple[FileChange, ...]  #: one object per file
    remarks: tuple[str, ...]  #: what is left to do
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDocument:
    """Printed instead of another document when a command fails; the same is on stderr."""

    version: int = VERSION  #: version of the document
    kind: str = "error"  #: kind of the document
    error: str  #: what failed
    hint: str  #: what may help
    exit_status: int  #: the command's exit status
