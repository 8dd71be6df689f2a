"""Texts of a guest's /proc about its CPUs: their APIC ids, and where a process may run.

Hostile input: the size and every number are bounded. Only x86 has APIC ids (proc_cpuinfo(5),
arch/x86/kernel/cpu/proc.c). Out of scope: whether to believe the text (policy).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.cpuset import MAX_CPU, CpuSet

MAX_CPUINFO: Final = 4 << 20
"""Longest /proc/cpuinfo accepted: enough for 2,700 CPUs of 1.5 KiB each."""

MAX_STATUS: Final = 64 * 1024
MAX_APIC_ID: Final = 0xFFFFFFFE

_NUMBER: Final = re.compile(rb"[0-9]{1,10}\Z")


def parse_cpuinfo(data: bytes) -> Mapping[int, int]:
    """Read /proc/cpuinfo: each online guest CPU's APIC id, by CPU number.

    ParseError for a CPU without an APIC id, or when two CPUs have the same number or id.
    """
    if len(data) > MAX_CPUINFO:
        raise ParseError(f"longer than {MAX_CPUINFO} bytes", source="cpuinfo")
    found: dict[int, int] = {}
    cpu = -1
    for line in data.splitlines():
        name, colon, value = line.partition(b":")
        key = name.strip()
        if not colon or key not in {b"processor", b"apicid"}:
            continue
        number = _number(value.strip())
        if key == b"processor":
            if cpu >= 0 and cpu not in found:
                raise ParseError(f"CPU {cpu} has no apicid", source="cpuinfo")
            if number > MAX_CPU or number in found:
                raise ParseError(
                    "CPU number repeated or too high", source="cpuinfo", text=str(number)
                )
            cpu = number
        elif cpu < 0 or cpu in found or number > MAX_APIC_ID:
            raise ParseError("misplaced or invalid apicid", source="cpuinfo", text=str(number))
        else:
            found[cpu] = number
    if cpu < 0 or cpu not in found:
        raise ParseError("the last CPU has no apicid", source="cpuinfo")
    if len(set(found.values())) != len(found):
        raise ParseError("two CPUs have the same apicid", source="cpuinfo")
    return MappingProxyType(found)


def parse_allowed(data: bytes) -> CpuSet:
    """Read Cpus_allowed_list of /proc/<pid>/status; ParseError if it is missing or empty.

    These are the online CPUs that both the cgroup's cpuset and the process's affinity allow.
    """
    if len(data) > MAX_STATUS:
        raise ParseError(f"longer than {MAX_STATUS} bytes", source="status")
    for line in data.splitlines():
        name, _, value = line.partition(b":")
        if name == b"Cpus_allowed_list":
            cpus = CpuSet.parse(value.decode("ascii", "replace"), source="Cpus_allowed_list")
            if cpus:
                return cpus
    raise ParseError("no Cpus_allowed_list", source="status")


def _number(text: bytes) -> int:
    if _NUMBER.match(text) is None:
        raise ParseError("not a number", source="cpuinfo", text=text[:80].decode("latin-1"))
    return int(text)
