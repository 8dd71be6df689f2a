"""`who` and `map` as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from kata_pin.base.cpuset import union
from kata_pin.base.documents.answers import MapDocument, MapSandbox
from kata_pin.base.documents.measured import HostProcess, KernelThreads, WhoDocument, WhoPcpu
from kata_pin.base.documents.state import Guest, GuestContainer, GuestVcpu
from kata_pin.base.values import count, listed
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
from kata_pin.cli.reports import pcpus
from kata_pin.cli.reports import words as reports_words
from kata_pin.cli.reports.words import NOTHING, age

_NAMES_SHOWN: Final = 6
_COMMAND_SHOWN: Final = 60
"""Characters of a command line in the table; `--json` has more."""


def who(document: WhoDocument, output: Output) -> list[Text]:
    """Return the pCPUs, and every host thread that may run on them."""
    only = document.pcpus[0] if len(document.pcpus) == 1 else None
    lines = facts(_place(only, output), output) if only else _places(document.pcpus, output)
    if not document.daemon.running:
        lines += paragraph(phrases.daemon(document.daemon), output)
    if not any(one.online for one in document.pcpus):
        return [*lines, styled("offline: no thread can run here", phrases.ODD)]
    lines.append(Text())
    columns = [
        Column("PID", right=True),
        Column("NAME", NAMES, fold=12, comfort=16),
        Column("USER", NAMES, fold=8),
        Column("OWNER", NAMES, fold=12, comfort=20),
        Column("AFFINITY", CPUS),
        Column("THREADS", ", ", fold=16, comfort=20),
        Column("AGE", breaks="", right=True, optional=1),
        Column("CPU-TIME", breaks="", right=True),
        Column("COMMAND", " /", fold=16, comfort=24, optional=1),
    ]
    rows = [_process(process, output) for process in document.processes]
    lines += table(columns, rows, output) if rows else [Text("no user processes")]
    here = "this pCPU" if only else "these pCPUs"
    lines += [Text(), *_kernel(document.kernel, here, output)]
    intruders = sum(1 for process in document.processes if process.intruder)
    if intruders:
        where = "this exclusive pCPU" if only else "exclusive pCPUs"
        headline = f"! {count(intruders, 'intruder')} on {where}"
        lines += [Text(), *paragraph(styled(headline, phrases.BAD), output, indent=2)]
    return lines


def _place(pcpu: WhoPcpu, output: Output) -> list[tuple[str, Text]]:
    place = pcpu.place
    where = ""
    if place is not None:
        where = output.dot.join(
            [
                f"NUMA node {place.node}",
                f"package {place.package}",
                f"core {place.core}",
                f"siblings {place.siblings}",
                *place.marks,
            ]
        )
    busy = f"{_busy(pcpu)} of the last 0.2 s" if pcpu.busy_percent is not None else ""
    return [
        ("pCPU", styled(str(pcpu.cpu), phrases.NAME)),
        ("place", styled(where)),
        ("claim", styled(_claim(pcpu))),
        ("busy", Text(busy)),
    ]


def _places(pcpus: Sequence[WhoPcpu], output: Output) -> list[Text]:
    """Return one row per pCPU."""
    columns = [
        Column("pCPU", right=True),
        Column("NUMA", right=True),
        Column("SIBLINGS", CPUS),
        Column("BUSY", breaks="", right=True),
        Column("CLAIM", NAMES, fold=20),
        Column("MARKS", fold=12, optional=1),
    ]
    return table(columns, [_placed(one) for one in pcpus], output)


def _placed(pcpu: WhoPcpu) -> list[Text]:
    place = pcpu.place
    return [
        styled(str(pcpu.cpu), phrases.NAME),
        Text(NOTHING if place is None else str(place.node)),
        phrases.cpus(None if place is None else place.siblings),
        Text(_busy(pcpu)),
        styled(_claim(pcpu) if pcpu.online else "offline", "" if pcpu.online else phrases.ODD),
        styled(", ".join(place.marks) if place else ""),
    ]


def _claim(pcpu: WhoPcpu) -> str:
    claims = (
        f"{claim.claim} {'to' if claim.claim == 'exclusive' else 'by'} {claim.pod}"
        + (f" ({claim.container})" if claim.container else "")
        for claim in pcpu.claims
    )
    return "; ".join(claims) or "none"


def _busy(pcpu: WhoPcpu) -> str:
    return NOTHING if pcpu.busy_percent is None else f"{pcpu.busy_percent:.0f} %"


def _process(process: HostProcess, output: Output) -> list[Text]:
    counts: dict[str, int] = {}
    for thread in process.threads:
        name = thread.label or thread.comm
        counts[name] = counts.get(name, 0) + 1
    threads = [n if c == 1 else f"{n} {output.times}{c}" for n, c in counts.items()]
    command = process.command or NOTHING
    if len(command) > _COMMAND_SHOWN:
        command = f"{command[: _COMMAND_SHOWN - 3]}..."
    owner = process.pod or "the host"
    style = phrases.BAD if process.intruder else ""
    return [
        Text(str(process.pid)),
        styled(process.comm, style),
        styled(process.user or NOTHING),
        styled(f"{owner}, intruder" if process.intruder else owner, style),
        styled(str(union(pcpus.parse(thread.affinity) for thread in process.threads))),
        styled(listed(threads, _NAMES_SHOWN)),
        Text(age(process.age_s)),
        Text(NOTHING if process.cpu_s is None else f"{process.cpu_s:.1f} s"),
        styled(command, phrases.DIM),
    ]


def _kernel(kernel: KernelThreads, here: str, output: Output) -> list[Text]:
    lines: list[Text] = []
    for threads, words in (
        (kernel.bound, f"bound to {here}"),
        (kernel.roaming, "that may also run here"),
    ):
        names = list(dict.fromkeys(thread.comm for thread in threads))
        if names:
            text = f"{count(len(threads), 'kernel thread')} {words}: {listed(names, _NAMES_SHOWN)}"
            lines += paragraph(styled(text, phrases.DIM), output, indent=2)
    return lines


# `map`: pCPUs, vCPUs, guest CPUs and containers, connected by lines from left to right.
#
# A solid line is a link that may be acted on, a broken one is only inferred, a cross is unknown.
# The vCPUs of one container end in one bracket.

ROOM: Final = 64
"""Least width that has room for the lines; below it the numbers stand alone."""

PROOF_WORDS: Final = {
    "none": "not verified",
    "read": "read back",
    "fits": "consistent with used CPU time",
    "broken": "not in force",
    "refused": "refused by kata-agent",
}


def guest_map(document: MapDocument, output: Output) -> list[Text]:
    """Return the picture of each sandbox, and the guest CPUs of each container."""
    lines: list[Text] = []
    if not document.daemon.running:
        lines += [*paragraph(phrases.daemon(document.daemon), output), Text()]
    for n, sandbox in enumerate(document.sandboxes):
        lines += [Text()] if n else []
        lines += _sandbox(sandbox, output)
    return lines if document.sandboxes else [*lines, Text("no sandboxes")]


def _sandbox(sandbox: MapSandbox, output: Output) -> list[Text]:
    guest = sandbox.guest
    head = paragraph(styled(reports_words.owner(sandbox), phrases.NAME), output)
    if guest is None:
        return [*head, *paragraph(styled("no VMM, no map", phrases.ODD), output)]
    lines = [
        *head,
        *facts([("guest", phrases.guest(guest)), ("kernel", _map_kernel(guest))], output),
        Text(),
    ]
    if not guest.vcpus:
        return [*lines, *paragraph(styled("no vCPU thread found", phrases.ODD), output)]
    lines += _picture(guest, output)
    if guest.containers:
        lines += [Text(), *_containers(guest.containers, output)]
    return lines


_PLUGGED: Final = {
    True: "vCPUs were hotplugged",
    False: "no hotplugged vCPUs",
    None: "number of vCPUs at boot unknown",
}


def _map_kernel(guest: Guest) -> Text:
    source = f" ({guest.kernel_source})" if guest.kernel_source else ""
    plugged = _PLUGGED[guest.hotplugged]
    name = f"Linux {guest.kernel}" if guest.kernel else "unknown"
    return styled(f"{name}{source}; {plugged}")


def _picture(guest: Guest, output: Output) -> list[Text]:
    drawn = output.width >= ROOM
    columns = [
        Column("pCPU", CPUS, right=True),
        *([Column("")] if drawn else []),
        Column("vCPU", right=True),
        Column("TID", right=True, optional=1),
        *([Column("")] if drawn else []),
        Column("GUEST CPU", right=True),
        Column("KNOWN", fold=8),
        *([Column("")] if drawn else []),
        Column("CONTAINER", NAMES + ",", fold=12),
    ]
    return table(columns, list(_rows(guest, output, drawn=drawn)), output)


def _rows(guest: Guest, output: Output, *, drawn: bool) -> Iterator[list[Text]]:
    names = {one.id: one.name for one in guest.containers}
    sharers = ", ".join(one.name for one in guest.containers if not one.owned and one.cpus)
    first = _first_pcpus(guest)
    ordered = sorted(guest.vcpus, key=lambda one: _map_place(one, first))
    for owner, group in groupby(ordered, key=lambda one: one.container):
        vcpus = list(group)
        title = names.get(owner, owner[:12]) if owner else sharers
        for n, one in enumerate(vcpus):
            yield [
                phrases.cpus(one.cpus),
                *([_line(one.links.vcpu.state, output)] if drawn else []),
                Text("?" if one.vcpu is None else str(one.vcpu)),
                styled(str(one.tid), phrases.DIM),
                *([_line(one.state, output)] if drawn else []),
                phrases.guest_cpu(one),
                styled(one.state, phrases.KNOWN_STYLES.get(one.state, "")),
                *([Text(_bracket(n, len(vcpus), output))] if drawn else []),
                _owner(title, owned=bool(owner)) if n == 0 or not drawn else Text(),
            ]


def _first_pcpus(guest: Guest) -> dict[str, int]:
    """Return the lowest pCPU of each owner."""
    first: dict[str, int] = {}
    for one in guest.vcpus:
        cpus = pcpus.parse(one.cpus)
        if cpus:
            owner = one.container
            first[owner] = min(first.get(owner, cpus.first), cpus.first)
    return first


def _map_place(one: GuestVcpu, first: dict[str, int]) -> tuple[object, ...]:
    """Sort key: containers that own vCPUs by their first pCPU; vCPUs without an owner last."""
    owner, cpus = one.container, pcpus.parse(one.cpus)
    mine = cpus.first if cpus else -1
    return (owner == "", first.get(owner, -1), owner, mine, one.vcpu or 0, one.tid)


def _line(state: str, output: Output) -> Text:
    if state == "unknown":
        sign = "─╳─" if output.unicode else "-x-"  # noqa: RUF001 - the sign is meant
    elif state == "inferred":
        sign = "╌╌╌" if output.unicode else "- -"
    else:
        sign = "───" if output.unicode else "---"
    return styled(sign, phrases.KNOWN_STYLES.get(state, ""))


def _bracket(position: int, size: int, output: Output) -> str:
    signs = ("───", "─┬─", "─┤", "─┘") if output.unicode else ("---", "-+-", "-|", "-'")
    if size == 1:
        return signs[0]
    return signs[1 if position == 0 else 3 if position == size - 1 else 2]


def _owner(title: str, *, owned: bool) -> Text:
    if owned:
        return styled(title, phrases.NAME)
    return styled(f"{title}, shared" if title else "guest system", phrases.DIM)


def _containers(containers: Sequence[GuestContainer], output: Output) -> list[Text]:
    columns = [
        Column("CONTAINER", NAMES, fold=12),
        Column("GUEST CPUS", CPUS),
        Column("APPLIED IN GUEST", CPUS),
        Column("WHY", fold=16, comfort=24),
    ]
    return table(columns, [_container(one) for one in containers], output)


def _container(one: GuestContainer) -> list[Text]:
    why = one.reason
    if one.proof is not None:
        why = f"{PROOF_WORDS.get(one.proof, one.proof)}; {why}"
    if one.detail:
        why = f"{one.detail}; {why}"
    bad = one.proof in {"broken", "refused"}
    return [
        styled(one.name, phrases.NAME),
        styled(one.cpus or "any"),
        phrases.cpus(one.applied),
        styled(why, phrases.BAD if bad else phrases.DIM),
    ]
