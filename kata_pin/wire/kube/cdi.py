"""CPUs of DRA claims, from the CDI specs of the DRA driver for CPUs.

The driver (kubernetes-sigs/dra-driver-cpu, pkg/driver/cdi.go) writes a CDI spec of kind
`dra.k8s.io/cpu` for each prepared claim; its only edit is the variable `DRA_CPUSET_<claim uid>`
with the claim's CPUs. That is the one place on a node that has them: the kubelet's APIs and
dra_manager_state name claims, but no CPUs. Specs of other kinds are none of ours. Pure.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.cpuset import CpuSet
from kata_pin.wire.json_text import load_fields

MAX_BYTES: Final = 256 * 1024
"""Longest spec that is read: the driver's first versions had all claims in one."""

KIND: Final = "dra.k8s.io/cpu"

_SOURCE: Final = "CDI spec"
_VARIABLE: Final = re.compile(r"DRA_CPUSET_([0-9a-f-]{36})=(.*)", re.DOTALL)


def parse_claims(data: bytes) -> dict[str, CpuSet]:
    """Return the CPUs of each claim in a CDI spec by the claim's uid; ParseError if damaged.

    No claims for a spec of another kind, and none for a variable without a CPU list.
    """
    spec = load_fields(data, source=_SOURCE, limit=MAX_BYTES)
    if spec.text("kind") != KIND:
        return {}
    claims: dict[str, CpuSet] = {}
    for device in spec.objects("devices"):
        edits = device.fields("containerEdits")
        for line in edits.items("env"):
            found = _VARIABLE.fullmatch(line) if isinstance(line, str) else None
            with suppress(ParseError):
                if found and (cpus := CpuSet.parse(found[2])):
                    claims[found[1]] = cpus
    return claims
