"""`map`: pCPUs, vCPUs, guest CPUs and containers, connected by lines from left to right.

A solid line is a link that may be acted on, a broken one is only inferred, a cross is unknown. The
vCPUs of one container end in one bracket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from rich.text import Text

from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, facts, paragraph, styled, table
from kata_pin.cli.reports import pcpus, words
from kata_pin.model.reports.guest import Guest, GuestContainer, GuestVcpu
from kata_pin.model.reports.map import MapDocument, MapSandbox

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
    return lines or [Text("no sandboxes")]


def _sandbox(sandbox: MapSandbox, output: Output) -> list[Text]:
    guest = sandbox.guest
    head = paragraph(styled(words.owner(sandbox), phrases.NAME), output)
    if guest is None:
        return [*head, *paragraph(styled("no VMM, no map", phrases.ODD), output)]
    lines = [
        *head,
        *facts([("guest", phrases.guest(guest)), ("kernel", _kernel(guest))], output),
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


def _kernel(guest: Guest) -> Text:
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
    first = _first_pcpus(guest)
    ordered = sorted(guest.vcpus, key=lambda one: _place(one, first))
    for owner, group in groupby(ordered, key=lambda one: one.container):
        vcpus = list(group)
        title = names.get(owner, owner[:12]) if owner else _sharers(guest)
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


def _place(one: GuestVcpu, first: dict[str, int]) -> tuple[object, ...]:
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


def _sharers(guest: Guest) -> str:
    """Return the containers that use vCPUs without an owner."""
    return ", ".join(one.name for one in guest.containers if not one.owned and one.cpus)


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
