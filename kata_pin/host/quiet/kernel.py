"""The kernel's own work: its threads, workqueues, watchdog, tick, and what it was booted with.

Facts: Documentation/admin-guide/kernel-per-CPU-kthreads.rst, core-api/workqueue.rst,
admin-guide/sysctl/kernel.rst; include/linux/sched.h (flags of tasks).
"""

from __future__ import annotations

import re
from typing import Final

from kata_pin.errors import KataPinError
from kata_pin.host.interrupts import default_mask, read_interrupts
from kata_pin.host.quiet.power import read_power
from kata_pin.host.quiet.queues import read_queues
from kata_pin.host.quiet.reading import cpu_list, known, mask, text
from kata_pin.host.quiet.services import read_crio, read_irqbalance, read_partitions, read_tuned
from kata_pin.host.quiet.threads import movable, processes
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import MAX_CPU, CpuSet
from kata_pin.model.quiet.interrupts import Interrupt
from kata_pin.model.quiet.node import QuietFacts, Unknown
from kata_pin.wire.kernel import bootline

_OFFLOAD: Final = re.compile(r"rcuo[ps]/([0-9]{1,4})\Z")
"""A thread that runs RCU callbacks of one CPU (kernel/rcu/tree_nocb.h)."""


def read_facts(root: HostRoot, cpus: CpuSet) -> QuietFacts:
    """Return everything about the node, power of these pCPUs only; never raises."""
    sysctl = root.proc("sys/kernel")
    every = processes(root)
    names = {} if isinstance(every, Unknown) else {pid: one.comm for pid, one in every.items()}
    threads = every if isinstance(every, Unknown) else tuple(movable(root, every.values()))
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
