"""The guest of a sandbox as documents show it (model/reports/guest.py). Pure."""

from __future__ import annotations

from kata_pin.daemon.guests.status import GuestPlan, GuestView, Sent
from kata_pin.model.guest_map import GuestCpuset, Link, VcpuLink
from kata_pin.model.reports.guest import Guest, GuestContainer, GuestLink, GuestLinks, GuestVcpu
from kata_pin.model.sandbox import Sandbox


def guest_report(view: GuestView, sandbox: Sandbox, vcpus: tuple[GuestVcpu, ...] = ()) -> Guest:
    """Return the report with these vCPUs."""
    names = {one.id: one.title for one in sandbox.containers}
    found = view.plan.map
    return Guest(
        state=view.state.value,
        detail=view.detail,
        answered_s=None if view.asked_s is None else round(max(0.0, view.asked_s), 3),
        kernel=found.facts.release,
        kernel_source=found.facts.source,
        hotplugged=found.hotplugged,
        vcpus=vcpus,
        containers=tuple(
            _container(
                one, names.get(one.container_id, one.container_id), view.sent.get(one.container_id)
            )
            for one in view.plan.cpusets
        ),
    )


def vcpu_reports(plan: GuestPlan) -> tuple[GuestVcpu, ...]:
    """Return the vCPUs of a plan."""
    return tuple(_vcpu(one) for one in plan.map.links)


def _vcpu(one: VcpuLink) -> GuestVcpu:
    weakest = one.weakest
    return GuestVcpu(
        tid=one.key.tid,
        vcpu=one.index,
        apic_id=one.apic_id,
        guest_cpu=one.guest_cpu,
        state=weakest.state.value,
        source=weakest.source,
        links=GuestLinks(_link(one.thread_link), _link(one.apic_link), _link(one.guest_link)),
        cpus=str(one.cpus),
        paired=one.paired,
        container=one.container_id,
    )


def _link(link: Link) -> GuestLink:
    return GuestLink(link.state.value, link.source)


def _container(one: GuestCpuset, name: str, sent: Sent | None) -> GuestContainer:
    return GuestContainer(
        id=one.container_id,
        name=name,
        cpus=None if one.cpus is None else str(one.cpus),
        owned=one.owned,
        reason=one.reason,
        applied=None if sent is None else str(sent.cpus),
        proof=None if sent is None else sent.proof.value,
        detail="" if sent is None else sent.detail,
    )
