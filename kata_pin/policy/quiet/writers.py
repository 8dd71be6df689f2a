"""Which programs may have written a value of the kernel beside kata-pin. Pure.

The kernel does not record who writes these files, so this names programs that run and are known to
write such values. Facts: irqbalance, activate.c; tuned's plugins scheduler, cpu and sysctl; cri-o,
internal/runtimehandlerhooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kata_pin.model.quiet.node import Crio, Tuned, Unknown
from kata_pin.model.quiet.tunables import TunableKind
from kata_pin.policy.quiet.words import listed

_OF_IRQBALANCE: Final = frozenset({TunableKind.INTERRUPT})
_OF_ISOLATING: Final = frozenset(
    {TunableKind.INTERRUPT, TunableKind.DEFAULT_MASK, TunableKind.KERNEL_THREAD}
)
"""What tuned writes if its profile has isolated cores."""

_OF_TUNED: Final = frozenset(
    {
        *(TunableKind.WORKQUEUES, TunableKind.WATCHDOG),
        *(TunableKind.IDLE_LIMIT, TunableKind.GOVERNOR),
    }
)
_OF_CRIO: Final = frozenset(
    {TunableKind.DEFAULT_MASK, TunableKind.IDLE_LIMIT, TunableKind.GOVERNOR}
)


@dataclass(frozen=True, slots=True)
class Writers:
    """Programs that write such values: pids of irqbalance, tuned and CRI-O if they run."""

    irqbalance: tuple[int, ...]
    tuned: Tuned | Unknown | None
    crio: Crio | Unknown | None


def suspects(kind: TunableKind, writers: Writers) -> str:
    """Return in words who may have written a value of this kind."""
    names = list(_of(kind, writers))
    if not names:
        return "no program runs here that is known to write it, and the kernel records no writer"
    return f"perhaps {listed(names)}: the kernel records no writer"


def _of(kind: TunableKind, writers: Writers) -> Iterator[str]:
    if kind in _OF_IRQBALANCE:
        for pid in writers.irqbalance:
            yield f"irqbalance (pid {pid})"
    tuned, crio = writers.tuned, writers.crio
    if isinstance(tuned, Tuned):
        unknown = isinstance(tuned.profile, Unknown)
        if kind in _OF_TUNED or (kind in _OF_ISOLATING and (tuned.isolates or unknown)):
            profile = "" if unknown else f", profile {tuned.profile}"
            yield f"tuned (pid {tuned.pid}{profile})"
    if isinstance(crio, Crio) and kind in _OF_CRIO and crio.hooks:
        yield f"CRI-O's hooks (pid {crio.pid})"
