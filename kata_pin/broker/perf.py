"""Opening perf events that record which tasks a CPU switches between (perf_event_open(2)).

The event is a clock of the CPU, which also records switches, new tasks and names. Its samples, four
in a second, say who runs where nothing switches; they come from an idle CPU too, so one that went
offline is noticed.
"""

from __future__ import annotations

import os
import struct
from errno import ENOSYS
from typing import Final

from kata_pin.broker.libc import libc

SAMPLE_NS: Final = 250_000_000

_CALLS: Final = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
"""The number of the call by machine."""

_BYTES: Final = 136  # PERF_ATTR_SIZE_VER8
_ATTR: Final = struct.Struct("=IIQQQQQ")  # type, size, config, period, sample type, format, bits
_WATERMARK_AT: Final = 48
_CLOCK_AT: Final = 92
_SOFTWARE: Final = 1
_CPU_CLOCK: Final = 0
_TID, _TIME, _CPU = 1 << 1, 1 << 2, 1 << 7
_DISABLED, _COMM, _TASK, _WATERMARK = 1 << 0, 1 << 9, 1 << 13, 1 << 14
_SAMPLE_ID_ALL, _USE_CLOCKID, _CONTEXT_SWITCH = 1 << 18, 1 << 25, 1 << 26
_BITS: Final = _DISABLED | _COMM | _TASK | _WATERMARK | _SAMPLE_ID_ALL | _CONTEXT_SWITCH
_CLOCK_MONOTONIC: Final = 1
_WAKE_AT: Final = 64 * 1024  # bytes that were written since the last wake-up
_ANY_TASK: Final = -1
_NO_GROUP: Final = -1
_CLOEXEC: Final = 8


def open_switches(cpu: int) -> int:
    """Return a descriptor of such an event, not enabled yet; raises OSError.

    EACCES or EPERM without CAP_PERFMON, EINVAL or ENODEV for a CPU that is absent or offline.
    """
    kinds = _TID | _TIME | _CPU
    return open_event(attributes(_SOFTWARE, _CPU_CLOCK, SAMPLE_NS, kinds, _BITS), cpu)


def attributes(kind: int, config: int, period: int, fields: int, bits: int) -> bytes:
    """Return struct perf_event_attr; times are CLOCK_MONOTONIC."""
    found = bytearray(_BYTES)
    _ATTR.pack_into(found, 0, kind, _BYTES, config, period, fields, 0, bits | _USE_CLOCKID)
    struct.pack_into("=I", found, _WATERMARK_AT, _WAKE_AT)
    struct.pack_into("=i", found, _CLOCK_AT, _CLOCK_MONOTONIC)
    return bytes(found)


def open_event(attr: bytes, cpu: int) -> int:
    """Return a descriptor of an event on a CPU, of any task; raises OSError."""
    number = _CALLS.get(os.uname().machine)
    if number is None:
        raise OSError(ENOSYS, os.strerror(ENOSYS))
    return libc().call("syscall", number, attr, _ANY_TASK, cpu, _NO_GROUP, _CLOEXEC)
