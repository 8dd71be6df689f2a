"""`pools` and `alloc` as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from string import ascii_uppercase
from typing import Final

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.pools import (
    Allocation,
    AllocExplainDocument,
    Candidate,
    ComparedContainer,
    Comparison,
    Grant,
    RefusedRequest,
    WhatIf,
)
from kata_pin.base.documents.state import State
from kata_pin.base.values import count
from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import (
    CPUS,
    NAMES,
    Column,
    Output,
    Text,
    facts,
    paragraph,
    styled,
    table,
)
from kata_pin.cli.reports import pcpus, words
from kata_pin.cli.reports.pcpus import parse
from kata_pin.cli.reports.words import safe
from kata_pin.options.allocation.placement_files import PREFIX
from kata_pin.options.allocation.supposed import SAME

# `alloc compare` and `alloc what-if` as lines of text.


def compare(document: Comparison, output: Output) -> list[Text]:
    """Return what is compared, one row per container, and a summary."""
    ours = f"policy {document.policy}"
    ours += ", hypothetical" if document.hypothetical else ", in force"
    pairs = [
        ("kubelet", styled(f"policy {document.kubelet_policy}, {document.checkpoint}")),
        ("kata-pin", styled(ours)),
        ("shared", _pair(document.kubelet_shared, document.kata_pin_shared, output)),
    ]
    lines = facts(pairs, output)
    rows = document.containers
    if rows:
        columns = [
            Column("POD UID", NAMES, fold=20),
            Column("CONTAINER", NAMES, fold=16),
            Column("KUBELET", CPUS),
            Column("KATA-PIN", CPUS),
            Column(""),
        ]
        lines += [Text(), *table(columns, [_compared(row) for row in rows], output)]
    differ = sum(row.verdict != SAME for row in rows)
    told = "no differences" if document.same else "only the shared pCPUs differ"
    if differ:
        told = f"{count(differ, 'container')} of {len(rows)} would have other pCPUs"
    style = phrases.GOOD if document.same else phrases.ODD
    return [*lines, Text(), *paragraph(styled(told, style), output)]


def _compared(row: ComparedContainer) -> list[Text]:
    same = row.verdict == SAME
    return [
        styled(row.pod_uid),
        styled(row.name),
        phrases.cpus(row.kubelet),
        phrases.cpus(row.kata_pin),
        styled("" if same else row.verdict, phrases.ODD),
    ]


def _pair(kubelet: str, ours: str, output: Output) -> Text:
    return phrases.cpus(kubelet if kubelet == ours else f"{kubelet} {output.arrow} {ours}")


SHOWN: Final = 6
"""Candidates of a level that are shown beside those that were taken from."""


def what_if(document: WhatIf, output: Output) -> list[Text]:
    """Return the answer, then what was considered."""
    refused = document.refused
    noun = "CPU" if document.millis == 1000 else "CPUs"
    asked = f"policy {document.policy}, {document.millis / 1000:g} {noun}"
    if document.pod:
        asked += f", in pod {document.pod}"
    if document.near:
        asked += f", near {', '.join(document.near)}"
    lines = paragraph(styled(asked, "bold"), output)
    if refused is not None:
        outcome = "would be refused" if refused.strict else "would run in the shared pool"
        lines += paragraph(styled(f"! {outcome}: {refused.message}", phrases.BAD), output)
    lines += facts(_facts(document, output), output)
    for reason in _reasons(document):
        lines += paragraph(styled(f"- {reason}"), output, indent=2)
    for note in phrases.notes(document.notes):
        lines += paragraph(note, output)
    return [*lines, *_considered(document.candidates, output)]


def _facts(document: WhatIf, output: Output) -> Iterator[tuple[str, Text]]:
    grant, vm = document.grant, document.vm
    if grant is not None:
        yield "class", styled(grant.cpu_class)
        yield "exclusive", phrases.cpus(grant.exclusive)
        yield "shared", phrases.cpus(grant.shared)
        yield "memory", styled(grant.mems)
    if vm is not None:
        yield "VM overhead CPUs", phrases.cpus(vm.cpus)
    before, after = document.before, document.after
    change = f"{before.shared} {output.arrow} {after.shared}"
    same = before.shared == after.shared
    if before.taken:
        yield "taken", Text(f"{before.taken}, exclusive to other containers")
    yield "shared pool", styled(f"{after.shared}, unchanged" if same else change)
    others = count(len(document.others), "container or VM", "containers and VMs")
    yield "others", Text(f"{others} would get other pCPUs" if document.others else "unchanged")


def _reasons(document: WhatIf) -> Iterator[str]:
    for granted in (document.grant, document.vm):
        if granted is not None:
            yield from granted.reasons


def _considered(candidates: Sequence[Candidate], output: Output) -> list[Text]:
    """Return the table of candidates: the first ones of each level, and all that were taken."""
    if not candidates:
        return [
            Text(),
            *paragraph(styled("no candidates: too few free pCPUs", phrases.ODD), output),
        ]
    names = [key.name for key in candidates[0].keys]
    columns = [
        Column("LEVEL"),
        *(Column(name.upper(), right=True) for name in names),
        Column("FREE", CPUS),
        Column("TAKEN", CPUS),
    ]
    shown = list(_shown(candidates))
    lines = [
        Text(),
        Text("candidates in order of comparison:"),
        *table(columns, [_candidate(one) for one in shown], output),
    ]
    left_out = len(candidates) - len(shown)
    if left_out:
        told = f"{count(left_out, 'more candidate')}, not taken; --json lists all"
        lines += paragraph(styled(told, phrases.DIM), output)
    return lines


def _shown(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    seen: dict[str, int] = {}
    for one in candidates:
        seen[one.level] = seen.get(one.level, 0) + 1
        if one.taken or seen[one.level] <= SHOWN:
            yield one


def _candidate(one: Candidate) -> list[Text]:
    return [
        styled(one.level),
        *(Text(str(key.value)) for key in one.keys),
        phrases.cpus(one.cpus),
        styled(one.taken, phrases.GOOD),
    ]


# `pools` and `alloc explain`: the pools drawn, their owners, and why a container has its CPUs.
#
# Each NUMA node is a strip of signs, one a pCPU, siblings side by side and cores apart: a letter
# for an owner of exclusive pCPUs, `.` for the shared pool, `+` for reserved ones in it, `h` for
# housekeeping, `x` for pCPUs that others gave to containers exclusively, `-` for those outside all
# pools.

LETTERS: Final = ascii_uppercase
SHARED, RESERVED, HOUSEKEEPING, TAKEN, NOBODYS = ".", "+", "h", "x", "-"
_OFF: Final = "CPU allocation is off (alloc.policy: none)"
_SANDBOXES_ONLY: Final = (
    "exclusive among sandboxes only: without NRI, other containers may run on any pCPU"
)


def pools(state: State, output: Output) -> list[Text]:
    """Return the pools of a node, drawn, with their owners."""
    lines = phrases.head(state, output)
    allocation = state.allocation
    if allocation is None:
        return [*lines, *paragraph(Text(_OFF), output)]
    letters = _letters(allocation)
    lines += paragraph(_heading(allocation, output), output)
    if not allocation.suspended:
        if allocation.push is not None:  # unknown without a daemon
            way = f"changed cpusets {words.way(allocation.push)}"
            lines += paragraph(styled(way, phrases.DIM), output)
        lines += [Text(), *_sizes(allocation, output), *_strips(state, allocation, letters, output)]
        lines += [Text(), *_grants(allocation, letters, output), *_pending(allocation, output)]
    lines += [*_holders(allocation, output), *_told(allocation, output)]
    return lines


def explain(document: AllocExplainDocument, output: Output) -> list[Text]:
    """Return why one container has the CPUs that it has."""
    grant = document.grant
    pending = grant.pending
    sent = styled(grant.cpuset) if grant.cpuset else Text("none: only threads are pinned")
    if pending is not None:
        sent = styled(f"{pending}, not sent yet", phrases.ODD)
    title = f"{safe(grant.pod)} {safe(grant.name) or _vm(grant)}"
    pairs = [
        ("class", Text(f"{grant.cpu_class}, policy {grant.policy}")),
        ("pCPUs", phrases.cpus(grant.cpus)),
        ("exclusive", phrases.cpus(grant.exclusive)),
        ("shared", phrases.cpus(grant.shared)),
        ("memory", styled(grant.mems)),
        ("request", Text(f"{grant.millis / 1000:g} CPUs" if grant.millis else "none")),
        ("override", styled(grant.override or "")),
        ("cpuset", sent),
        *((name, styled(text)) for name, text in adjusted(grant).items()),
        ("ended", Text("yes: its pCPUs wait for its next instance" if grant.ended else "")),
    ]
    lines = [*paragraph(Text(title, style="bold"), output), *facts(pairs, output)]
    for reason in grant.reasons:
        lines += paragraph(styled(f"- {reason}"), output)
    return lines


def _heading(allocation: Allocation, output: Output) -> Text:
    policy = f"policy {safe(allocation.policy)}"
    if allocation.suspended:
        return styled(f"{policy}, suspended: {allocation.suspended}", phrases.ODD)
    whole = allocation.guarantee != "sandboxes only"
    held = f"exclusive among {safe(allocation.guarantee)}" if whole else _SANDBOXES_ONLY
    return Text(output.dot.join((policy, held)))


def _unsent(allocation: Allocation) -> Iterator[str]:
    """Yield why cpusets could not be sent."""
    push = allocation.push
    if push is None:
        return
    if push.problem:
        yield f"cpusets cannot be sent: {push.problem}; retrying"
    titles = {one.id: f"{one.pod} {one.name}" for one in allocation.grants}
    for one in push.failures:
        yield f"{titles.get(one.id, one.id)}: cpuset not changed: {one.message}"


def _sizes(allocation: Allocation, output: Output) -> list[Text]:
    found = allocation.pools
    pairs = [
        ("exclusive", found.exclusive, "letters"),
        ("shared", found.shared, SHARED),
        ("reserved", found.reserved, RESERVED),
        ("housekeeping", found.housekeeping, HOUSEKEEPING),
        ("taken", found.taken, TAKEN),
    ]
    if allocation.held_back:
        pairs.append(("withheld", allocation.held_back, "until threads have moved"))
    told = ((name, cpus, f"({len(parse(cpus))}, {sign})") for name, cpus, sign in pairs if cpus)
    return facts([(name, styled(f"{cpus}  {size}")) for name, cpus, size in told], output)


def _letters(allocation: Allocation) -> dict[str, str]:
    """Return a letter for each owner of exclusive pCPUs; reused after the last one."""
    owners = [one.id for one in allocation.grants if one.exclusive]
    return {owner: LETTERS[n % len(LETTERS)] for n, owner in enumerate(owners)}


def _strips(
    state: State, allocation: Allocation, letters: Mapping[str, str], output: Output
) -> Iterator[Text]:
    signs = _signs(allocation, letters)
    for node, members in groupby(pcpus.view(state), key=lambda pcpu: pcpu.place.node):
        cores = pcpus.by_core(members)
        drawn = ["".join(signs.get(one.number, NOBODYS) for one in core) for core in cores]
        yield from facts([(f"NUMA node {node}", Text(" ".join(drawn)))], output)


def _signs(allocation: Allocation, letters: Mapping[str, str]) -> dict[int, str]:
    """Return the sign of each pCPU that is in a pool."""
    found = allocation.pools
    signs = dict.fromkeys(parse(found.reserved), RESERVED)
    shared = dict.fromkeys(parse(found.shared) - CpuSet(signs), SHARED)
    signs |= shared | dict.fromkeys(parse(found.housekeeping), HOUSEKEEPING)
    signs |= dict.fromkeys(parse(found.taken), TAKEN)
    for grant in allocation.grants:
        signs |= dict.fromkeys(parse(grant.exclusive), letters.get(grant.id, ""))
    return signs


def _grants(allocation: Allocation, letters: Mapping[str, str], output: Output) -> list[Text]:
    waits = any(one.pending is not None for one in allocation.grants)
    more = any(one.adjustment is not None for one in allocation.grants)
    columns = [
        Column("KEY"),
        Column("POD", NAMES, fold=20),
        Column("CONTAINER", NAMES, fold=16),
        Column("CLASS"),
        Column("EXCLUSIVE", CPUS),
        Column("SHARED", CPUS),
        *([Column("PENDING", CPUS)] if waits else []),
        *([Column("ALSO", fold=24)] if more else []),
    ]
    ordered = sorted(allocation.grants, key=lambda one: not one.exclusive)
    rows = [_row(one, letters, waits=waits, more=more) for one in ordered]
    return table(columns, rows, output) if rows else [Text("no containers")]


def _row(grant: Grant, letters: Mapping[str, str], *, waits: bool, more: bool) -> Sequence[Text]:
    row = [
        styled(letters.get(grant.id, ""), phrases.NAME),
        styled(grant.pod),
        styled(grant.name or _vm(grant), "" if grant.name else phrases.DIM),
        styled(f"{grant.cpu_class}, ended" if grant.ended else grant.cpu_class),
        phrases.cpus(grant.exclusive),
        phrases.cpus(grant.shared),
    ]
    row += [styled(grant.pending or "", phrases.ODD)] if waits else []
    also = "; ".join(f"{name} {text}" for name, text in adjusted(grant, short=True).items())
    return [*row, styled(also)] if more else row


def adjusted(grant: Grant, *, short: bool = False) -> dict[str, str]:
    """Return what a container gets beside pCPUs, by its name for people.

    `short` leaves out the values of variables, and the variables with its placement.
    """
    more = grant.adjustment
    if more is None:
        return {}
    period = "" if more.period_us is None else f"{more.period_us} us"
    quota = "" if more.quota_us is None else f"{more.quota_us} us"
    found = {
        "CPU shares": "" if more.shares is None else str(more.shares),
        "CPU quota": "none" if more.quota_us == -1 else quota,
        "CPU period": period,
        "memory limit": "" if more.memory is None else f"{more.memory} bytes",
        "hugepages": ", ".join(f"{one.size} {one.limit} bytes" for one in more.hugepages),
        "RDT class": more.rdt_class,
        "block-I/O class": more.blockio_class,
        "environment": " ".join(
            one.name if short else f"{one.name}={one.value}"
            for one in more.env
            if not (short and one.name.startswith(PREFIX))
        ),
        "mounts": ", ".join(one.destination for one in more.mounts),
        "devices": ", ".join(
            one.path if short else f"{one.path} ({one.access})" for one in more.devices
        ),
        "annotations": " ".join(
            one.name if short else f"{one.name}={one.value}" for one in more.annotations
        ),
    }
    return {name: text for name, text in found.items() if text}


def _holders(allocation: Allocation, output: Output) -> list[Text]:
    """Return who has the taken pCPUs, and how that is known."""
    if not allocation.holders:
        return []
    columns = [
        Column("POD", NAMES, fold=20),
        Column("CONTAINER", NAMES, fold=16),
        Column("EXCLUSIVE", CPUS),
        Column("SOURCE"),
        Column("REASON", optional=True),
    ]
    rows = [
        [
            styled(one.pod),
            styled(one.name),
            phrases.cpus(one.cpus),
            styled(words.holder_source(one)),
            styled(one.reason, phrases.DIM),
        ]
        for one in allocation.holders
    ]
    return [Text(), Text("pCPUs that others gave exclusively:"), *table(columns, rows, output)]


def _vm(grant: Grant) -> str:
    return "(VM)" if grant.kind == "sandbox" else grant.id[:12]


def _pending(allocation: Allocation, output: Output) -> list[Text]:
    if all(one.pending is None for one in allocation.grants):
        return []
    push = allocation.push
    text = "being sent" if push and push.channel else "sent at the runtime's next NRI call"
    return paragraph(styled(f"pending: {text}", phrases.ODD), output)


def _told(allocation: Allocation, output: Output) -> Iterator[Text]:
    for problem in allocation.problems:
        yield from paragraph(styled(f"! cannot read {problem}", phrases.ODD), output)
    for text in _unsent(allocation):
        yield from paragraph(styled(f"! {text}", phrases.ODD), output)
    for one in allocation.refused:
        yield from paragraph(styled(_refusal(one), phrases.ODD), output)
    for note in phrases.notes(allocation.notes):
        yield from paragraph(note, output)


def _refusal(one: RefusedRequest) -> str:
    outcome = "refused" if one.strict else "runs in the shared pool"
    return f"! {one.time} {one.container}: {outcome}: {one.message}"
