"""The kernel's own work: its threads, workqueues, watchdog, tick, and what it was booted with.

Facts: Documentation/admin-guide/kernel-per-CPU-kthreads.rst, core-api/workqueue.rst,
admin-guide/sysctl/kernel.rst; include/linux/sched.h (flags of tasks).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from kata_pin.errors import KataPinError, ParseError
from kata_pin.host.files import STAT_BYTES, read_bytes
from kata_pin.host.interrupts import default_mask, read_interrupts
from kata_pin.host.process import read_process
from kata_pin.host.quiet.power import read_power
from kata_pin.host.quiet.queues import read_queues
from kata_pin.host.quiet.reading import cpu_list, known, mask, text, unreadable
from kata_pin.host.quiet.services import read_crio, read_irqbalance, read_partitions, read_tuned
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import MAX_CPU, CpuSet
from kata_pin.model.quiet.interrupts import Interrupt
from kata_pin.model.quiet.node import KernelThread, QuietFacts, Unknown
from kata_pin.wire.kernel import bootline
from kata_pin.wire.proc import kernel_worker, status_field

NO_SETAFFINITY: Final = 0x0400_0000
"""PF_NO_SETAFFINITY: the kernel refuses to move this thread."""

KTHREADD: Final = 2

_OFFLOAD: Final = re.compile(r"rcuo[ps]/([0-9]{1,4})\Z")
"""A thread that runs RCU callbacks of one CPU (kernel/rcu/tree_nocb.h)."""


def read_facts(root: HostRoot, cpus: CpuSet) -> QuietFacts:
    """Return everything about the node, power of these pCPUs only; never raises."""
    sysctl = root.proc("sys/kernel")
    names, threads = _threads(root)
    own = () if isinstance(threads, Unknown) else threads
    offloaded = {int(found[1]) for found in (_OFFLOAD.match(one.comm) for one in own) if found}
    return QuietFacts(
        interrupts=_interrupts(root),
        default_mask=_default_mask(root),
        workqueues=mask(root.sys("devices/virtual/workqueue/cpumask")),
        watchdog=known(f"{sysctl}/watchdog", lambda data: int(data) != 0),
        watchdog_mask=cpu_list(f"{sysctl}/watchdog_cpumask"),
        numa_balancing=known(f"{sysctl}/numa_balancing", text),
        rt_runtime_us=known(f"{sysctl}/sched_rt_runtime_us", text),
        nohz_full=cpu_list(root.sys("devices/system/cpu/nohz_full")),
        boot=known(root.proc("cmdline"), bootline.parse_bootline, bootline.MAX_TEXT + 1),
        threads=threads,
        offloaded=CpuSet(offloaded & set(range(MAX_CPU))),
        queues=read_queues(root),
        power={cpu: read_power(root, cpu) for cpu in cpus},
        irqbalance=read_irqbalance(root, names),
        tuned=read_tuned(root, names),
        crio=read_crio(root, names),
        partitions=read_partitions(root),
    )


def _interrupts(root: HostRoot) -> tuple[Interrupt, ...] | Unknown:
    try:
        return read_interrupts(root)
    except KataPinError as error:
        return Unknown(error.message)


def _default_mask(root: HostRoot) -> CpuSet | Unknown:
    try:
        return default_mask(root)
    except KataPinError as error:
        return Unknown(error.message)


def _threads(root: HostRoot) -> tuple[dict[int, str], tuple[KernelThread, ...] | Unknown]:
    """Return the names of all processes that can be seen, and kernel threads that may be moved."""
    try:
        pids = [int(name) for name in os.listdir(root.proc()) if name.isdigit()]
    except OSError as error:
        return {}, unreadable(root.proc(), error)
    names: dict[int, str] = {}
    found: list[KernelThread] = []
    for pid in sorted(pids):
        with suppress(KataPinError, OSError):
            one = read_process(root, pid)
            names[pid] = one.comm
            if one.ppid == KTHREADD and not one.flags & NO_SETAFFINITY and _general(one.comm):
                found += _movable(root, pid, one.comm)
    if 1 not in names:
        return names, Unknown(f"{root.proc()} hides the processes of others (hidepid)")
    return names, tuple(found)


def _general(comm: str) -> bool:
    """Whether a kernel thread works for the whole node.

    An interrupt's follows its interrupt, and KVM's and vhost's belong to a sandbox.
    """
    return not comm.startswith("irq/") and kernel_worker(comm) is None


def _movable(root: HostRoot, pid: int, comm: str) -> Iterator[KernelThread]:
    status = read_bytes(root.proc(pid, "status"), STAT_BYTES)
    allowed = status_field(status, "Cpus_allowed_list")
    if allowed is not None:
        with suppress(ParseError):
            yield KernelThread(pid, comm, CpuSet.parse(allowed))
