"""`show --cpus` and `doctor`: what disturbs exclusive pCPUs beside tasks, and what helps.

Read by the command line, so it works without the daemon, and with whatever rights the user has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.state import (
    Quiet,
    QuietCpu,
    QuietInterrupt,
    QuietSibling,
    Row,
    Sandbox,
    State,
)
from kata_pin.base.values import QuietLevel
from kata_pin.cli.reports import owners, pcpus
from kata_pin.linux.cgroups import CgroupFiles
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.options.quiet import findings
from kata_pin.options.quiet.decide import Firing, firing, rate_of, softirq_rates
from kata_pin.options.quiet.findings import Claimed
from kata_pin.options.quiet.read import read_counters, read_facts, read_sandbox
from kata_pin.options.quiet.values import QuietFacts, Reading, SandboxFacts, Unknown
from kata_pin.placement.owners import Owner

if TYPE_CHECKING:
    from kata_pin.cli.doctor.node import Examined

MEASURED_S: Final = 1.0
"""How long interrupts are counted."""


def read_quiet(state: State, root: HostRoot = HOST) -> Quiet:
    """Return what disturbs the exclusive pCPUs of a state, counted for a second; never raises."""
    owned = {one.cpu: one for one in owners.owners(state)}
    online = pcpus.parse(state.node.online)
    exclusive = CpuSet(owned) & online
    if not exclusive:
        return Quiet(0.0, (), (), ())
    first = read_counters(root, exclusive)
    time.sleep(MEASURED_S)
    last = read_counters(root, exclusive)
    facts = read_facts(root, exclusive)
    claimed = Claimed(exclusive, online - exclusive)
    known = () if isinstance(facts.interrupts, Unknown) else facts.interrupts
    there = firing(known, first, last, exclusive)
    cpus = tuple(_cpu(cpu, owned, state, facts, (there, first, last)) for cpu in exclusive)
    rows = (
        *findings.findings(facts, there, claimed),
        *findings.kernel_findings(facts, claimed),
        *findings.sandbox_findings(_sandboxes(state, root), _shared_cores(cpus, owned)),
    )
    problems = tuple(dict.fromkeys((*first.problems, *last.problems)))
    return Quiet(round(last.time_s - first.time_s, 3), cpus, rows, problems)


def prerequisites(examined: Examined) -> Iterator[Row]:
    """Yield the findings for `doctor`; nothing where only sandboxes are asked for."""
    if not examined.node or examined.state is None:
        return
    if examined.config.quiet is QuietLevel.OFF:
        yield Row("quiet pCPUs", "info", "not looked at (quiet: off)")
        return
    found = read_quiet(examined.state, examined.root)
    if not found.cpus:
        yield Row("quiet pCPUs", "info", "no pod has exclusive pCPUs: nothing to keep quiet")
    for why in found.problems:
        yield Row("interrupts", "warn", f"not readable: {why}")
    yield from found.rows


def _cpu(
    cpu: int,
    owned: dict[int, Owner],
    state: State,
    facts: QuietFacts,
    measured: tuple[Sequence[Firing], Reading, Reading],
) -> QuietCpu:
    owner, power = owned[cpu], facts.power[cpu]
    there, first, last = measured
    threads, full = facts.threads, facts.nohz_full
    return QuietCpu(
        cpu=cpu,
        owner=owner.pod,
        container=owner.container,
        interrupts=(
            None
            if isinstance(facts.interrupts, Unknown)
            else tuple(_interrupt(one) for one in there if one.cpu == cpu)
        ),
        tick_per_s=rate_of("tick", cpu, first, last),
        ipi_per_s=rate_of("ipi", cpu, first, last),
        softirqs=softirq_rates(cpu, first, last),
        kernel_threads=(
            None if isinstance(threads, Unknown) else sum(cpu in one.affinity for one in threads)
        ),
        nohz_full=(False if full.absent else None) if isinstance(full, Unknown) else cpu in full,
        idle_limit=None if isinstance(power.latency, Unknown) else power.latency,
        governor=None if isinstance(power.governor, Unknown) else power.governor,
        frequency_with=str(power.shared),
        siblings=_siblings(cpu, owned, state),
    )


def _interrupt(one: Firing) -> QuietInterrupt:
    interrupt = one.interrupt
    mask = str(interrupt.mask)
    return QuietInterrupt(interrupt.number, interrupt.row.name, one.kind, mask, one.per_s)


def _siblings(cpu: int, owned: dict[int, Owner], state: State) -> tuple[QuietSibling, ...]:
    core = next((place.core for place in state.node.cpus if place.cpu == cpu), None)
    return tuple(
        QuietSibling(place.cpu, owned[place.cpu].pod if place.cpu in owned else "")
        for place in state.node.cpus
        if place.core == core and place.cpu != cpu
    )


def _shared_cores(cpus: Sequence[QuietCpu], owned: dict[int, Owner]) -> dict[str, list[str]]:
    """Return by sandbox id which of its pCPUs share a core with what is not its own."""
    found: dict[str, list[str]] = {}
    for one in cpus:
        owner = owned[one.cpu]
        for sibling in one.siblings:
            other = owned.get(sibling.cpu)
            if other is None or other.sandbox != owner.sandbox:
                whose = sibling.owner or "not exclusive"
                text = f"pCPU {one.cpu} with {sibling.cpu} ({whose})"
                found.setdefault(owner.sandbox, []).append(text)
    return found


def _sandboxes(state: State, root: HostRoot) -> list[SandboxFacts]:
    files = CgroupFiles(root, "cpu")
    return [
        read_sandbox(files, one.id, one.pod, vmm=one.vmm.pid if one.vmm else None, vcpu=_vcpu(one))
        for one in state.sandboxes
        if one.exclusive
    ]


def _vcpu(found: Sandbox) -> int | None:
    return next((one.tid for one in found.threads if one.role == "vcpu"), None)
