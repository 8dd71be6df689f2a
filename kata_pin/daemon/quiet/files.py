"""Writes the files of tunables in the form that each takes, and reads them back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from errno import ENOENT, ESRCH
from typing import Final

from kata_pin.calls import TunableWrite
from kata_pin.daemon.quiet.tuner import Write, Written
from kata_pin.errors import ParseError
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.quiet.tunables import NO_CPU, TunableKind
from kata_pin.wire.kernel.masks import parse_mask

PART: Final = 64
"""Writes after which the event loop gets a turn."""

_QUEUES: Final = frozenset({TunableKind.RPS, TunableKind.XPS})
_MASKS: Final = _QUEUES | {TunableKind.DEFAULT_MASK, TunableKind.WORKQUEUES}
_WORDS: Final = frozenset({TunableKind.IDLE_LIMIT, TunableKind.GOVERNOR})


class TunableFiles:
    """Every tunable that is a file, or the affinity of a kernel thread."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root

    async def write(self, writes: Sequence[Write]) -> list[Written]:
        """Write values; ENOENT for what is not there any more."""
        root = self._root
        prefix = "" if root.live else root.path("").rstrip("/")
        done: list[Written] = []
        for at in range(0, len(writes), PART):
            part = [_request(one) for one in writes[at : at + PART]]
            for asked, answer in zip(part, root.calls.write_tunables(part, prefix), strict=True):
                gone = ENOENT if answer.errno == ESRCH else answer.errno
                done.append(Written(gone, _value(asked.kind, answer.value)))
            await asyncio.sleep(0)
        return done


def _request(one: Write) -> TunableWrite:
    value = one.value
    if one.key.kind in _MASKS:
        value = (CpuSet() if value == NO_CPU else CpuSet.parse(value)).hex_mask()
    return TunableWrite(one.key.kind.value, one.key.name, value)


def _value(kind: str, text: str) -> str | None:
    """Return what a file has, as it is observed; None for what makes no sense."""
    with contextlib.suppress(ParseError):
        if kind in _WORDS:
            return text
        cpus = parse_mask(text.encode(), kind) if kind in _MASKS else CpuSet.parse(text)
        return str(cpus) or (NO_CPU if kind in _QUEUES else "")
    return None
