"""Findings about interrupts on exclusive pCPUs, and about who moves interrupts. Pure.

Boot parameters: Documentation/admin-guide/kernel-parameters.rst (irqaffinity, isolcpus).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.quiet.node import Irqbalance, QuietFacts, Unknown
from kata_pin.model.reports.doctor import Row
from kata_pin.policy.quiet.firing import MANAGED, MOVABLE, Firing
from kata_pin.policy.quiet.words import Claimed, listed, named, not_known, setting_or


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
        return Row("interrupts", "ok", "none that can be moved is on an exclusive pCPU")
    by_rate = sorted(firing, key=lambda one: -one.per_s)
    numbers = list(dict.fromkeys(one.interrupt.number for one in by_rate))
    active = [one for one in firing if one.per_s]
    which = f"{count(len(numbers), 'interrupt')} that can be moved"
    verb = "is" if len(numbers) == 1 else "are"
    doing = f"active now: {_named(active)}" if active else "all silent now"
    text = f"{which} {verb} on exclusive pCPUs; {doing}"
    if not claimed.others:
        return Row("interrupts", "warn", text, "leave at least one pCPU to no pod")
    command = f"echo {claimed.others} > /proc/irq/$i/smp_affinity_list"
    return Row("interrupts", "warn", text, setting_or("quiet: irq", numbers, command))


def _managed(firing: Sequence[Firing], claimed: Claimed) -> Row:
    check = "managed interrupts"
    if not firing:
        return Row(check, "ok", "none is on an exclusive pCPU")
    active = [one for one in firing if one.per_s]
    shared = [one for one in firing if one.interrupt.mask & claimed.others]
    text = f"{_count_of(firing)} on exclusive pCPUs, placed by the kernel for good"
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


def _count_of(firing: Sequence[Firing]) -> str:
    return count(len({one.interrupt.number for one in firing}), "managed interrupt")


def _named(firing: Sequence[Firing]) -> str:
    by_rate = sorted(firing, key=lambda one: (-one.per_s, one.interrupt.number, one.cpu))
    return listed([_one(each) for each in by_rate])


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
        remedy = f"echo {kept.hex_mask()} > /proc/irq/default_smp_affinity; for good: "
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
                f"acts on irq-load-balancing.crio.io ({listed(found.hooks)}): it writes the "
                "default mask and restarts irqbalance"
            )
            yield Row("CRI-O", "info", text, "remove the annotation from allowed_annotations")
        else:
            yield Row("CRI-O", "ok", "its hooks for quiet CPUs are off")
