"""Which sandbox a name means: an id or its start, or a pod."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kata_pin.cli.reports import words
from kata_pin.cli.reports.words import safe
from kata_pin.errors import KataPinError
from kata_pin.model.reports.names import SandboxName

SHOWN: Final = 5
"""Candidates named in an error."""


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
