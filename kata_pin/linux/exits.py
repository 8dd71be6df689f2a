"""How long vCPUs were outside their guests, by KVM's tracepoints.

An exit lasts from kvm_exit to the next kvm_entry of the same thread. One in which the vCPU halted
(kvm_vcpu_wakeup came in between) is the guest's own idle time, whichever reason this CPU's vendor
numbers it by (arch/x86/kvm/trace.h, virt/kvm/kvm_main.c).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Final

from kata_pin.base.counters import MeasuredExits
from kata_pin.base.cpuset import CpuSet
from kata_pin.linux.files import HostRoot, read_text
from kata_pin.linux.tracepoints import Traced, TraceRecorder, event_id

LONG_EXIT_NS: Final = 100_000
"""An exit of this length or more is long: handled by QEMU, or not at all for a while."""

MOST_VCPUS: Final = 1024
"""Most threads whose exits are told apart."""

_KVM_EXIT, _KVM_ENTRY, _KVM_WAKEUP = "kvm/kvm_exit", "kvm/kvm_entry", "kvm/kvm_vcpu_wakeup"


class ExitTimes:
    """Adds up the exits of vCPU threads, by thread and reason."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], MeasuredExits] = {}
        self._tids: set[int] = set()
        self._out: dict[int, tuple[int, int]] = {}
        """Of each thread that is outside: since when, and why."""
        self._halted: set[int] = set()

    def exit(self, tid: int, reason: int, time_ns: int) -> None:
        """A vCPU leaves its guest."""
        if tid in self._tids or len(self._tids) < MOST_VCPUS:
            self._tids.add(tid)
            self._out[tid] = time_ns, reason

    def halt(self, tid: int) -> None:
        """It has halted since it left."""
        if tid in self._out:
            self._halted.add(tid)

    def enter(self, tid: int, time_ns: int) -> None:
        """It goes on in its guest; one whose exit was not seen does not count."""
        since, reason = self._out.pop(tid, (-1, 0))
        halted = tid in self._halted
        self._halted.discard(tid)
        if since < 0:
            return
        took = max(0, time_ns - since)
        one = self._sums.get((tid, reason)) or MeasuredExits(tid, reason)
        if halted:
            one = one._replace(halts=one.halts + 1, halted_ns=one.halted_ns + took)
        else:
            one = one._replace(
                times=one.times + 1,
                total_ns=one.total_ns + took,
                longest_ns=max(one.longest_ns, took),
                long=one.long + (took >= LONG_EXIT_NS),
            )
        self._sums[tid, reason] = one

    def forget(self) -> None:
        """Records were lost: what is under way is not known."""
        self._out.clear()
        self._halted.clear()

    def sums(self) -> tuple[MeasuredExits, ...]:
        """Return the sums by thread and reason."""
        return tuple(self._sums.values())


class ExitRecorder(TraceRecorder):
    """Records the exits of vCPUs on some pCPUs until `end`."""

    what = "exits"

    def __init__(self, root: HostRoot, cpus: CpuSet) -> None:
        self._events: dict[int, str] = {}
        self._names: Mapping[int, str] = {}
        self._times = {cpu: ExitTimes() for cpu in cpus}
        super().__init__(root, cpus)

    def _find(self, tracing: str) -> Collection[int]:
        numbers = {event_id(tracing, name): name for name in (_KVM_EXIT, _KVM_ENTRY, _KVM_WAKEUP)}
        if None in numbers:
            return ()
        self._events = {number: name for number, name in numbers.items() if number is not None}
        vendor = _vendor(self._root)
        if vendor is not None:
            with suppress(OSError):
                text = read_text(f"{tracing}/events/{_KVM_EXIT}/format")
                self._names = exit_names(text, vendor)
        return self._events

    def _forget(self, cpu: int) -> None:
        self._times[cpu].forget()

    def _add(self, cpu: int, hits: Iterable[Traced]) -> None:
        times, events = self._times[cpu], self._events
        for hit in hits:
            name = events.get(hit.event)
            if name == _KVM_EXIT:
                times.exit(hit.tid, hit.number & 0xFFFF_FFFF, hit.time_ns)
            elif name == _KVM_ENTRY:
                times.enter(hit.tid, hit.time_ns)
            elif name == _KVM_WAKEUP:
                times.halt(hit.tid)

    def end(self) -> tuple[tuple[MeasuredExits, ...] | None, str]:
        """Return what was recorded, or None and why it is not known."""
        self.drain()
        if self.problem:
            return None, self.problem
        return tuple(
            one._replace(name=self._names.get(one.reason, ""))
            for times in self._times.values()
            for one in times.sums()
        ), ""


_REASON: Final = re.compile(
    r'\{ (0x[0-9a-f]{1,8}|[0-9]{1,10})(?: \+ ([0-9]{1,3}))?, "([^"]{1,40})" \}'
)


def exit_names(text: str, vendor: int) -> dict[int, str]:
    """Return KVM's names of exit reasons, from the format of kvm_exit.

    The format has a table per vendor: 0 is Intel's, 1 AMD's.
    """
    tables = text.partition("print fmt")[2].split("__print_symbolic")[1:]
    table = tables[vendor] if vendor < len(tables) else ""
    return {
        int(number, 0) + int(more or 0): name.lower()
        for number, more, name in _REASON.findall(table)
    }


def _vendor(root: HostRoot) -> int | None:
    """Return whose exits the host's KVM has: 0 Intel's, 1 AMD's; None if it is neither module."""
    for number, module in enumerate(("kvm_intel", "kvm_amd")):
        if os.path.isdir(root.sys("module", module)):
            return number
    return None
