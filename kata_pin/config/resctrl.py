"""The settings of caches and memory bandwidth: the section `resctrl`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kata_pin.config.alloc import read_pattern
from kata_pin.config.kinds import (
    NAME,
    Kind,
    Raw,
    expected,
    listing,
    mapping,
    setting,
    text_of,
)
from kata_pin.errors import ConfigError, ParseError
from kata_pin.model.settings import ClassRule

MAX_SCHEMATA: Final = 4096

_LINE: Final = re.compile(
    r"[A-Z][A-Z0-9]{0,15}:[0-9]{1,5}=[0-9a-fA-F]{1,16}(;[0-9]{1,5}=[0-9a-fA-F]{1,16})*\Z"
)


def _read_schemata(raw: Raw) -> str:
    text = text_of(raw)
    lines = text.split()
    if not lines or len(text) > MAX_SCHEMATA or not all(map(_LINE.match, lines)):
        raise expected(_SCHEMATA_WORDS, text)
    return " ".join(lines)


def _read_rule(raw: Raw) -> ClassRule:
    if not isinstance(raw, dict):
        raise ParseError("expected a mapping with namespace, handler and class")
    unknown = sorted(raw.keys() - {"namespace", "handler", "class"})
    if unknown:
        raise ParseError("expected namespace, handler or class", text=unknown[0])
    if "class" not in raw:
        raise ParseError("expected a class")
    return ClassRule(
        CLASS.read(raw["class"]),
        read_pattern(raw.get("namespace", "*")),
        read_pattern(raw.get("handler", "*")),
    )


def _write_rule(rule: ClassRule) -> Raw:
    return {"namespace": rule.namespace, "handler": rule.handler, "class": rule.class_name}


CLASS: Final = NAME
_SCHEMATA_WORDS: Final = (
    "lines of a schemata file with blanks between them, such as L3:0=ff;1=f MB:0=50"
)
SCHEMATA: Final = Kind(_SCHEMATA_WORDS, _read_schemata)
CLASS_RULE: Final = Kind("a mapping with namespace, handler and class", _read_rule, _write_rule)


@dataclass(frozen=True)
class Resctrl:
    """Caches and memory bandwidth of sandboxes, counted and limited by the kernel's resctrl."""

    enabled: bool = setting(
        False,
        "count for each sandbox what it uses of caches and memory bandwidth, in a monitoring group "
        "of resctrl that holds all of its threads; the service needs more rights for it, which "
        "`kata-pin install` gives",
    )
    classes: Mapping[str, str] = setting(
        MappingProxyType({}),
        "classes of sandboxes, each with its schemata; each takes one of the few that the CPU has",
        mapping(CLASS, SCHEMATA),
        example='{latency: "L3:0=ff0;1=ff0", batch: "L3:0=00f;1=00f MB:0=30;1=30"}',
    )
    rules: tuple[ClassRule, ...] = setting(
        (),
        "which sandboxes get which class, by namespace and runtime handler; the first rule that "
        "fits applies, such as {namespace: prod-*, class: latency}; without one a sandbox stays in "
        "resctrl's default group",
        listing(CLASS_RULE),
    )

    def check(self) -> None:
        """Refuse rules that name no class, or have no effect, with ConfigError without a file."""
        for rule in self.rules:
            if rule.class_name not in self.classes:
                raise ConfigError(f"no class {rule.class_name!r}", key="resctrl.rules")
        if self.rules and not self.enabled:
            raise ConfigError("without effect while resctrl.enabled is false", key="resctrl.rules")

    def class_of(self, namespace: str, handler: str) -> str:
        """Return the class of a sandbox, empty for none."""
        fitting = (rule.class_name for rule in self.rules if rule.fits(namespace, handler))
        return next(fitting, "")
