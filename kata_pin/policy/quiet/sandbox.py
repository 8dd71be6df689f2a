"""Findings about sandboxes with exclusive pCPUs: quotas, siblings, core scheduling. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kata_pin.model.quiet.node import SandboxFacts, Unknown
from kata_pin.model.reports.doctor import Row
from kata_pin.policy.quiet.words import not_known


def findings(
    sandboxes: Sequence[SandboxFacts], siblings: Mapping[str, Sequence[str]]
) -> Iterator[Row]:
    """Yield the rows about each sandbox.

    `siblings` say by sandbox id which pCPUs share a core with one of another owner.
    """
    for one in sandboxes:
        name = one.pod
        yield _row(_quota(one), name)
        if shared := siblings.get(one.sandbox):
            text = f"shares cores: {'; '.join(shared)}"
            remedy = "give out whole cores: full-pcpus-only of the kubelet, or in alloc.options"
            yield Row("SMT siblings", "warn", text, remedy, name)
        yield _row(_cookie(one, shared=bool(shared)), name)


def _row(found: Row, sandbox: str) -> Row:
    return Row(found.check, found.status, found.text, found.remedy, sandbox)


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
