"""Which class of resctrl a sandbox gets: by the administrator's rules, or by its pod's choice."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from kata_pin.model.alloc import RDT_KEY
from kata_pin.model.settings import AllowRule

_MAX_SHOWN: Final = 40


class CacheClass(NamedTuple):
    """A class, empty for none, and why it is not what the pod asked for (empty: it is)."""

    name: str
    problem: str = ""


def cache_class(
    value: str | None,
    assigned: str,
    known: Collection[str],
    allow: Iterable[AllowRule],
    *,
    namespace: str,
    handler: str,
) -> CacheClass:
    """Return the class of a sandbox whose pod has this value of the annotation RDT_KEY.

    `assigned` is the class by the rules, `known` are those of the settings. A pod gets another one
    only if a rule of alloc.allow names it for the pod (D17).
    """
    if not value or value == assigned:
        return CacheClass(assigned)
    offered = (rule.rdt for rule in allow if rule.matches(namespace, handler))
    shown = f"annotation {RDT_KEY}: {value[:_MAX_SHOWN]!r} ignored"
    if not any(value in one for one in offered):
        return CacheClass(assigned, f"{shown}: no rule of alloc.allow names it")
    if value not in known:
        return CacheClass(assigned, f"{shown}: no class of resctrl.classes")
    return CacheClass(value)
