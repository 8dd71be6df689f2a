"""Findings about what disturbs exclusive pCPUs: interrupts, the kernel's own work, quotas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet, union
from kata_pin.base.documents.state import Row
from kata_pin.base.errors import ParseError
from kata_pin.base.values import count, listed
from kata_pin.options.quiet.decide import MANAGED, MOVABLE, Firing
from kata_pin.options.quiet.values import Irqbalance, Power, QuietFacts, SandboxFacts, Unknown

# Rows of the report, and the words that several of them share.

NAMED: Final = 3
"""Things that are named one by one."""


class Claimed(Struct, frozen=True):
    """`exclusive` are pCPUs that pods own, `others` those that are left for everything else."""

    exclusive: CpuSet
    others: CpuSet


def not_known(check: str, why: Unknown, absent: str = "") -> Row:
    """Return the row of something that could not be read, or that this node does not have.

    `absent` is what to say in the latter case.
    """
    if why.absent:
        return Row(check, "info", absent or f"not on this node: {why.reason}")
    remedy = "run as root" if "ermission" in why.reason or "permitted" in why.reason else ""
    return Row(check, "warn", f"not readable: {why.reason}", remedy)


def named(cpus: CpuSet) -> str:
    """Return pCPUs in words, such as `exclusive pCPU 4` or `exclusive pCPUs 4-7`."""
    return f"exclusive pCPU{'' if len(cpus) == 1 else 's'} {cpus}"


MOST: Final = 16
"""Numbers up to which a command for all of them is worth showing."""


def setting_or(setting: str, values: Sequence[int], command: str) -> str:
    """Return a remedy: a setting, or a shell command for each of these numbers, `$i` in it."""
    if len(values) > MOST:
        return f"{setting} in the configuration"
    return f"{setting} in the configuration, or {_each(values, command)}"


def _each(values: Sequence[int], command: str) -> str:
    if len(values) == 1:
        return command.replace("$i", str(values[0]))
    return f"for i in {' '.join(map(str, values))}; do {command}; done"


# Findings about interrupts on exclusive pCPUs, and about who moves interrupts.
#
# Boot parameters: Documentation/admin-guide/kernel-parameters.rst (irqaffinity, isolcpus).


def findings(facts: QuietFacts, firing: Sequence[Firing], claimed: Claimed) -> Iterator[Row]:
    """Yield the rows about interrupts; `firing` are those on exclusive pCPUs."""
    if isinstance(facts.interrupts, Unknown):
        yield not_known("interrupts", facts.interrupts)
    else:
        yield _movable([one for one in firing if one.kind == MOVABLE], claimed)
        yield _managed([one for one in firing if one.kind == MANAGED], claimed)
    yield _default_mask(facts.default_mask, claimed)
    yield from _irqbalance(facts.irqbalance, claimed)
    yield from _tuned(facts, claimed)
    yield from _crio(facts)


def _movable(firing: Sequence[Firing], claimed: Claimed) -> Row:
    if not firing:
        return Row("interrupts", "ok", "no interrupt that can be moved is on an exclusive pCPU")
    by_rate = sorted(firing, key=lambda one: -one.per_s)
    numbers = list(dict.fromkeys(one.interrupt.number for one in by_rate))
    active = [one for one in firing if one.per_s]
    which = f"{count(len(numbers), 'interrupt')} that can be moved"
    verb = "is" if len(numbers) == 1 else "are"
    doing = f"active now: {_named(active)}" if active else "all silent now"
    text = f"{which} {verb} on exclusive pCPUs; {doing}"
    if not claimed.others:
        return Row("interrupts", "warn", text, "leave at least one pCPU without a pod")
    command = f"echo {claimed.others} > /proc/irq/$i/smp_affinity_list"
    return Row("interrupts", "warn", text, setting_or("quiet: irq", numbers, command))


def _managed(firing: Sequence[Firing], claimed: Claimed) -> Row:
    check = "managed interrupts"
    if not firing:
        return Row(check, "ok", "none is on an exclusive pCPU")
    active = [one for one in firing if one.per_s]
    shared = [one for one in firing if one.interrupt.mask & claimed.others]
    which = count(len({one.interrupt.number for one in firing}), "managed interrupt")
    text = f"{which} on exclusive pCPUs, placed permanently by the kernel"
    if not active and not shared:
        return Row(check, "ok", f"{text}; silent while nothing there submits I/O")
    parts = [f"now active: {_named(active)}"] if active else []
    if shared:
        parts.append(f"shared with other pCPUs: {_named(shared)}")
    remedy = (
        f"boot with isolcpus=managed_irq,{claimed.exclusive}, which moves shared ones; keep I/O "
        "threads off exclusive pCPUs (overhead: housekeeping)"
    )
    return Row(check, "warn" if active else "info", f"{text}; {'; '.join(parts)}", remedy)


def _named(firing: Sequence[Firing]) -> str:
    by_rate = sorted(firing, key=lambda one: (-one.per_s, one.interrupt.number, one.cpu))
    return listed([_one(each) for each in by_rate], NAMED)


def _one(firing: Firing) -> str:
    number, name = firing.interrupt.number, firing.interrupt.row.name
    return f"{name} (interrupt {number}) {firing.per_s:g}/s on pCPU {firing.cpu}"


def _default_mask(mask: CpuSet | Unknown, claimed: Claimed) -> Row:
    check = "default mask"
    if isinstance(mask, Unknown):
        return not_known(check, mask)
    if both := mask & claimed.exclusive:
        text = f"new interrupts may be put on {named(both)} (default_smp_affinity)"
        kept = mask & claimed.others or claimed.others
        remedy = f"echo {kept.hex_mask()} > /proc/irq/default_smp_affinity; permanently: "
        remedy += f"boot with irqaffinity={kept}"
        return Row(check, "info", text, remedy if kept else "")
    return Row(check, "ok", f"new interrupts go to {mask or 'no pCPU'}")


def _irqbalance(found: Irqbalance | Unknown | None, claimed: Claimed) -> Iterator[Row]:
    check = "irqbalance"
    if isinstance(found, Unknown):
        yield not_known(check, found)
        return
    if found is None:
        yield Row(check, "ok", "not running: interrupts stay where they are put")
        return
    environment = found.environment
    if not isinstance(environment, Unknown) and environment.get("IRQBALANCE_BANNED_CPUS"):
        text = (
            f"started with IRQBALANCE_BANNED_CPUS={environment['IRQBALANCE_BANNED_CPUS']}, which "
            "is deprecated and overrides IRQBALANCE_BANNED_CPULIST"
        )
        yield Row(check, "warn", text, "use IRQBALANCE_BANNED_CPULIST in its configuration file")
    who = f"running (pid {found.pid})"
    banned = found.banned
    if isinstance(banned, Unknown):
        text = f"{who}; its bans are not known: {banned.reason}"
        yield Row(check, "warn", text, _ban_remedy(claimed))
    elif missing := claimed.exclusive - banned:
        text = f"{who}; may move interrupts to {named(missing)}; banned: {banned or 'none'}"
        yield Row(check, "warn", text, _ban_remedy(claimed))
    else:
        yield Row(check, "ok", f"{who}; keeps clear of {banned}")


def _ban_remedy(claimed: Claimed) -> str:
    where = "/etc/default/irqbalance or /etc/sysconfig/irqbalance"
    return (
        f"IRQBALANCE_BANNED_CPULIST={claimed.exclusive} in {where}, then systemctl restart "
        "irqbalance"
    )


def _tuned(facts: QuietFacts, claimed: Claimed) -> Iterator[Row]:
    found = facts.tuned
    if isinstance(found, Unknown):
        yield not_known("tuned", found)
    elif found is not None:
        if isinstance(found.profile, Unknown):
            yield not_known("tuned", found.profile)
        elif found.isolates:
            text = f"profile {found.profile} has isolated_cores: tuned sets masks of interrupts too"
            remedy = f"isolated_cores={claimed.exclusive} in its variables, or another profile"
            yield Row("tuned", "warn", text, remedy)
        else:
            yield Row("tuned", "ok", f"profile {found.profile}, without isolated cores")


def _crio(facts: QuietFacts) -> Iterator[Row]:
    found = facts.crio
    if isinstance(found, Unknown):
        yield not_known("CRI-O", found)
    elif found is not None:
        if isinstance(found.hooks, Unknown):
            yield not_known("CRI-O", found.hooks)
        elif found.hooks:
            text = (
                f"acts on irq-load-balancing.crio.io ({listed(found.hooks, NAMED)}): it writes the "
                "default mask and restarts irqbalance"
            )
            yield Row("CRI-O", "info", text, "remove the annotation from allowed_annotations")
        else:
            yield Row("CRI-O", "ok", "its hooks for quiet CPUs are off")


# Findings about the kernel's own work, idle states and isolated pCPUs.
#
# Facts are in Documentation/admin-guide/kernel-per-CPU-kthreads.rst, kernel-parameters.rst
# (nohz_full, rcu_nocbs, isolcpus), timers/no_hz.rst, networking/scaling.rst.


def kernel_findings(facts: QuietFacts, claimed: Claimed) -> Iterator[Row]:
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
    return Row("kernel threads", "info", f"{which}: {listed(names, NAMED)}", remedy)


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
    yield Row("RPS and XPS", "warn", f"{which}: {listed(named, NAMED)}", f"echo {kept} > {place}")


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


# Findings about sandboxes with exclusive pCPUs: quotas, siblings, core scheduling.


def sandbox_findings(
    sandboxes: Sequence[SandboxFacts], siblings: Mapping[str, Sequence[str]]
) -> Iterator[Row]:
    """Yield the rows about each sandbox.

    `siblings` say by sandbox id which pCPUs share a core with one of another owner.
    """
    for one in sandboxes:
        name = one.pod
        yield replace(_quota(one), sandbox=name)
        if shared := siblings.get(one.sandbox):
            text = f"shares cores: {'; '.join(shared)}"
            remedy = "give out whole cores: full-pcpus-only of the kubelet, or in alloc.options"
            yield Row("SMT siblings", "warn", text, remedy, name)
        yield replace(_cookie(one, shared=bool(shared)), sandbox=name)


def _quota(one: SandboxFacts) -> Row:
    check = "CPU quota"
    if isinstance(one.quota, Unknown):
        return not_known(check, one.quota)
    if one.quota is None:
        return Row(check, "ok", "none")
    text = f"its threads have at most {one.quota:g} CPUs"
    if isinstance(one.throttled, Unknown):
        return Row(check, "warn", f"{text}; throttling not readable: {one.throttled.reason}")
    times, seconds = one.throttled
    if not times:
        return Row(check, "info", f"{text}; never throttled so far")
    remedy = (
        "Kubernetes 1.33 and later set none on exclusive CPUs (feature gate "
        "DisableCPUQuotaWithExclusiveCPUs); before that, cpu-quota.crio.io: disable"
    )
    return Row(check, "warn", f"{text}; throttled {times} times, {seconds:.1f} s in all", remedy)


def _cookie(one: SandboxFacts, *, shared: bool) -> Row:
    check = "core scheduling"
    if isinstance(one.cookie, Unknown):
        # Without siblings of others there is nothing that it could keep apart.
        return Row(check, "warn" if shared else "info", f"unknown: {one.cookie.reason}")
    if one.cookie:
        return Row(check, "ok", f"cookie {one.cookie:#x}: other tasks do not share a core with it")
    text = "no cookie: tasks of others may run on a sibling pCPU at the same time"
    return Row(check, "warn" if shared else "info", text)
