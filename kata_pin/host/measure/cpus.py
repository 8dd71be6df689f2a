"""What CPUs did: /proc/stat, /proc/schedstat, /proc/interrupts, /proc/softirqs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from errno import ENOENT
from typing import Final, TypeVar

from kata_pin.errors import ParseError
from kata_pin.host.files import read_bytes
from kata_pin.host.root import HostRoot
from kata_pin.model.measured.samples import CpuSample
from kata_pin.wire.kernel.interrupts import MAX_TEXT, parse_interrupts, parse_softirqs
from kata_pin.wire.kernel.sched import MAX_CPUS, parse_cpu_runs, parse_cpu_times

Value = TypeVar("Value")

_ABSENT: Final = {
    "schedstat": "this kernel has no /proc/schedstat (CONFIG_SCHEDSTATS)",
}


def cpu_samples(
    root: HostRoot, cpus: Collection[int], problems: dict[str, str], *, irq: bool = True
) -> dict[int, CpuSample]:
    """Return what each of these CPUs did since boot; without `irq` not which interrupts it had.

    What cannot be read is None; `problems` then has by file why.
    """

    def read(name: str, limit: int, parse: _Parser[Value]) -> Mapping[int, Value]:
        try:
            return parse(read_bytes(root.proc(name), limit), cpus)
        except OSError as error:
            absent = _ABSENT.get(name) if error.errno == ENOENT else None
            problems[name] = absent or f"cannot read /proc/{name}: {error.strerror}"
        except ParseError as error:
            problems[name] = error.message
        return {}

    if not cpus:
        return {}
    runs = read("schedstat", MAX_CPUS, parse_cpu_runs)
    times = read("stat", MAX_CPUS, parse_cpu_times)
    interrupts = read("interrupts", MAX_TEXT, parse_interrupts) if irq else {}
    softirqs = read("softirqs", MAX_TEXT, parse_softirqs) if irq else {}
    return {
        cpu: CpuSample(times.get(cpu), runs.get(cpu), interrupts.get(cpu), softirqs.get(cpu))
        for cpu in cpus
    }


_Parser = Callable[[bytes, Collection[int]], Mapping[int, Value]]
