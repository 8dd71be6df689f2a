"""Which sandboxes are meant: by an id or its start, a pod, a namespace, or by their problems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from kata_pin.cli.reports import words
from kata_pin.cli.reports.words import Named, safe
from kata_pin.errors import KataPinError
from kata_pin.model.reports.names import SandboxName
from kata_pin.model.reports.sandbox import Sandbox

SHOWN: Final = 5
"""Candidates named in an error."""

One = TypeVar("One", bound=Named)


def within(sandboxes: Iterable[One], namespace: str | None) -> list[One]:
    """Return the sandboxes whose pod is of a namespace; None: all."""
    return [one for one in sandboxes if namespace in {None, namespace_of(one)}]


def namespace_of(sandbox: Named) -> str | None:
    """Return the namespace of a sandbox's pod, None if its pod is unknown."""
    namespace, slash, _ = sandbox.pod.partition("/")
    return namespace if slash else None


def has_problem(sandbox: Sandbox) -> bool:
    """Return whether a sandbox needs attention.

    It is neither ok nor released on purpose, or it has a warning, or cpusets that were set in its
    guest are not in force.
    """
    if sandbox.state not in {"ok", "released"} or sandbox.vmm_problem:
        return True
    failed = sandbox.guest is not None and sandbox.guest.state == "failed"
    return failed or any(note.level == "warning" for note in sandbox.notes)


def choose(every: Sequence[SandboxName], text: str) -> SandboxName:
    """Return the one sandbox that `text` names: id, namespace/name, name, or start of an id.

    An exact match wins over a prefix. Raises KataPinError when there is none or more than one.
    """
    for matches in (
        [s for s in every if text in {s.id, s.pod}],
        [s for s in every if s.pod.partition("/")[2] == text],
        [s for s in every if text and s.id.startswith(text)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise KataPinError(
                f"{safe(text)!r} matches {len(matches)} sandboxes: {_named(matches)}",
                hint="give more of the id, or namespace/name",
            )
    from difflib import get_close_matches

    names = [name for s in every for name in (s.pod, s.pod.partition("/")[2], s.id)]
    near = get_close_matches(text, names, n=1)
    hint = f"did you mean {safe(near[0])}?" if near else "kata-pin show lists the sandboxes"
    raise KataPinError(f"no sandbox {safe(text)!r}", hint=hint)


def _named(sandboxes: list[SandboxName]) -> str:
    names = [f"{safe(words.owner(s))} ({s.id[:12]})" for s in sandboxes[:SHOWN]]
    more = len(sandboxes) - SHOWN
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
