"""Findings about the kernel's own work, idle states and isolated pCPUs. Pure.

Facts: Documentation/admin-guide/kernel-per-CPU-kthreads.rst, kernel-parameters.rst (nohz_full,
rcu_nocbs, isolcpus), timers/no_hz.rst, networking/scaling.rst.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kata_pin.errors import ParseError
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.quiet.node import Power, QuietFacts, Unknown
from kata_pin.model.reports.doctor import Row
from kata_pin.policy.quiet.words import Claimed, listed, named, not_known, setting_or


def findings(facts: QuietFacts, claimed: Claimed) -> Iterator[Row]:
    """Yield the rows about everything but interrupts and sandboxes."""
    yield _workqueues(facts.workqueues, claimed)
    yield _threads(facts, claimed)
    yield from _queues(facts, claimed)
    yield _watchdog(facts, claimed)
    yield _tick(facts, claimed)
    yield _callbacks(facts, claimed)
    yield from _idle(facts.power, claimed)
    yield from _governors(facts.power, claimed)
    yield _numa_balancing(facts.numa_balancing)
    yield from _realtime(facts.rt_runtime_us)
    yield from _isolation(facts, claimed)


def _workqueues(mask: CpuSet | Unknown, claimed: Claimed) -> Row:
    if isinstance(mask, Unknown):
        return not_known("workqueues", mask, "this kernel has no mask for unbound work")
    if both := mask & claimed.exclusive:
        remedy = f"echo {claimed.others.hex_mask()} > /sys/devices/virtual/workqueue/cpumask"
        text = f"unbound work may run on {named(both)}"
        return Row("workqueues", "info", text, remedy if claimed.others else "")
    return Row("workqueues", "ok", f"unbound work runs on {mask}")


def _threads(facts: QuietFacts, claimed: Claimed) -> Row:
    if isinstance(facts.threads, Unknown):
        return not_known("kernel threads", facts.threads)
    there = [one for one in facts.threads if one.affinity & claimed.exclusive]
    if not there:
        return Row("kernel threads", "ok", "none that can be moved may run on an exclusive pCPU")
    which = f"{count(len(there), 'kernel thread')} that can be moved may run on exclusive pCPUs"
    names = [f"{one.comm} (tid {one.tid})" for one in there]
    command = f"taskset -p -c {claimed.others} $i"
    remedy = setting_or("quiet: full", [one.tid for one in there], command)
    remedy = remedy if claimed.others else ""
    return Row("kernel threads", "info", f"{which}: {listed(names)}", remedy)


def _queues(facts: QuietFacts, claimed: Claimed) -> Iterator[Row]:
    if isinstance(facts.queues, Unknown):
        yield not_known("RPS and XPS", facts.queues)
        return
    there = [one for one in facts.queues if one.cpus & claimed.exclusive]
    if not there:
        yield Row("RPS and XPS", "ok", "no network queue is spread to exclusive pCPUs")
        return
    named = [f"{one.device} {one.name} ({one.kind}_cpus)" for one in there]
    which = f"{count(len(there), 'network queue')} spread to exclusive pCPUs"
    first = there[0]
    kept = (first.cpus - claimed.exclusive).hex_mask()
    place = f"/sys/class/net/{first.device}/queues/{first.name}/{first.kind}_cpus"
    yield Row("RPS and XPS", "warn", f"{which}: {listed(named)}", f"echo {kept} > {place}")


def _watchdog(facts: QuietFacts, claimed: Claimed) -> Row:
    if isinstance(facts.watchdog, Unknown):
        return not_known("watchdog", facts.watchdog, "this kernel has no lockup detectors")
    if not facts.watchdog:
        return Row("watchdog", "ok", "the lockup detectors are off")
    mask = facts.watchdog_mask
    if isinstance(mask, Unknown):
        return not_known("watchdog", mask)
    if both := mask & claimed.exclusive:
        text = f"the lockup detectors interrupt {named(both)}"
        kept = mask - claimed.exclusive
        remedy = f"sysctl kernel.watchdog_cpumask={kept}" if kept else "sysctl kernel.watchdog=0"
        return Row("watchdog", "info", text, remedy)
    return Row("watchdog", "ok", f"the lockup detectors watch {mask} only")


def _tick(facts: QuietFacts, claimed: Claimed) -> Row:
    found = facts.nohz_full
    if isinstance(found, Unknown):
        if found.absent:
            text = "this kernel cannot stop the tick of a busy pCPU (CONFIG_NO_HZ_FULL)"
            return Row("tick", "info", text, "a kernel with CONFIG_NO_HZ_FULL")
        return not_known("tick", found)
    if ticking := claimed.exclusive - found:
        text = f"the scheduler tick interrupts vCPUs on {named(ticking)}"
        remedy = f"boot with nohz_full={claimed.exclusive | found} (pays off for guests that poll)"
        return Row("tick", "info", text, remedy)
    return Row("tick", "ok", f"nohz_full {found}")


def _callbacks(facts: QuietFacts, claimed: Claimed) -> Row:
    if isinstance(facts.threads, Unknown):
        return not_known("RCU", facts.threads)
    if left := claimed.exclusive - facts.offloaded:
        text = f"RCU callbacks of {named(left)} run there"
        remedy = f"boot with rcu_nocbs={claimed.exclusive | facts.offloaded}"
        return Row("RCU", "info", text, remedy)
    return Row("RCU", "ok", f"callbacks of {facts.offloaded} are run by threads (rcu_nocbs)")


def _idle(power: Mapping[int, Power], claimed: Claimed) -> Iterator[Row]:
    check = "idle states"
    limits: dict[str, list[int]] = {}
    for cpu in claimed.exclusive:
        one = power.get(cpu)
        if one is None:
            continue
        if isinstance(one.latency, Unknown):
            yield not_known(check, one.latency, "no limits of idle states on this node")
            return
        limits.setdefault(one.latency, []).append(cpu)
    if not limits:
        return
    words = {"0": "no limit", "n/a": "no idle state but polling"}
    text = "; ".join(
        f"{named(CpuSet(cpus))}: {words.get(limit, f'at most {limit} us to wake up')}"
        for limit, cpus in limits.items()
    )
    place = f"/sys/devices/system/cpu/cpu{claimed.exclusive.first}/power/pm_qos_resume_latency_us"
    remedy = f"echo 20 > {place} limits the time to wake up" if "0" in limits else ""
    yield Row(check, "info", text, remedy)


def _governors(power: Mapping[int, Power], claimed: Claimed) -> Iterator[Row]:
    names: dict[str, list[int]] = {}
    for cpu in claimed.exclusive:
        one = power.get(cpu)
        if one is None:
            continue
        if isinstance(one.governor, Unknown):
            yield not_known("governor", one.governor, "no frequency control (cpufreq) on this node")
            return
        names.setdefault(one.governor, []).append(cpu)
    slow = CpuSet(cpu for name, cpus in names.items() if name != "performance" for cpu in cpus)
    text = "; ".join(f"{named(CpuSet(cpus))}: {name}" for name, cpus in names.items())
    foreign = union(power[cpu].shared for cpu in slow) - claimed.exclusive
    if foreign:
        text += f"; their frequency policies also cover pCPUs {foreign}"
    remedy = f"cpupower -c {slow} frequency-set -g performance" if slow else ""
    if names:
        yield Row("governor", "info" if slow else "ok", text, remedy)


def _numa_balancing(found: str | Unknown) -> Row:
    if isinstance(found, Unknown):
        return not_known("NUMA balancing", found, "not in this kernel")
    if found == "0":
        return Row("NUMA balancing", "ok", "off")
    text = "on: it unmaps memory of pinned VMs to see who uses it, which costs page faults"
    return Row("NUMA balancing", "warn", text, "sysctl kernel.numa_balancing=0")


def _realtime(found: str | Unknown) -> Iterator[Row]:
    if found == "-1":
        text = "real-time tasks are not throttled: one that never sleeps hangs its pCPU"
        yield Row("real-time limit", "warn", text, "sysctl kernel.sched_rt_runtime_us=950000")


def _isolation(facts: QuietFacts, claimed: Claimed) -> Iterator[Row]:
    check = "isolated pCPUs"
    boot = facts.boot
    if isinstance(boot, Unknown):
        yield not_known(check, boot)
    elif value := boot.get("isolcpus"):
        text = f"booted with isolcpus={value}: nothing balances tasks there"
        named = _cpus_of(value)
        if named is not None and named != claimed.exclusive:
            text += f"; the exclusive pCPUs are {claimed.exclusive}"
        yield Row(check, "info", f"{text}; kata-pin gives each thread there one pCPU")
    if isinstance(facts.partitions, Unknown):
        if not facts.partitions.absent:
            yield not_known(check, facts.partitions)
        return
    for one in facts.partitions:
        text = f"cgroup {one.cgroup} is a partition ({one.state}) of pCPUs {one.cpus or 'none'}"
        if one.state == "isolated":
            text += ": nothing balances tasks there, and interrupts are not kept off"
        elif "invalid" in one.state:
            yield Row(check, "warn", f"{text}: it isolates nothing")
            continue
        yield Row(check, "info", f"{text}; kata-pin writes no cgroup")


def _cpus_of(value: str) -> CpuSet | None:
    """Return the pCPUs of isolcpus, whose flags come before them; None: not a plain list."""
    words = [one for one in value.split(",") if one[:1].isdigit()]
    try:
        return CpuSet.parse(",".join(words))
    except ParseError:
        return None
