"""`show`: all sandboxes, or one with its containers and threads, as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kata_pin.base.documents.state import (
    Container,
    Guest,
    GuestVcpu,
    Interface,
    Sandbox,
    State,
    Thread,
)
from kata_pin.base.values import RoleSource, count
from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import (
    CPUS,
    NAMES,
    Column,
    Output,
    Row,
    Text,
    facts,
    fits,
    paragraph,
    styled,
    table,
)
from kata_pin.cli.render.phrases import DIM
from kata_pin.cli.reports import pcpus, words

# Texts of a table's rows that are said once below the table instead of in every row.

Rows = Callable[[Sequence[Text]], Sequence[Row]]
"""Makes a table's rows from the cells of the column with the texts, one per row."""


def table_with_footnotes(
    columns: Sequence[Column], rows: Rows, texts: Sequence[str], output: Output
) -> list[Text]:
    """Return a table and its footnotes, such as `[1] shared CPUs`.

    A text of several rows is a footnote; so is every other one where the table had to break cells.
    """
    again = {text for text in texts if text and texts.count(text) > 1}
    made = rows(_cells(texts, _numbered(texts, again)))
    if not fits(columns, made, output):
        again = {text for text in texts if text}
        made = rows(_cells(texts, _numbered(texts, again)))
    lines = table(columns, made, output)
    for text, number in _numbered(texts, again).items():
        lines += paragraph(styled(f"[{number}] {text}", DIM), output, indent=4)
    return lines


def _numbered(texts: Sequence[str], chosen: set[str]) -> dict[str, int]:
    """Return the numbers of the chosen texts, in the order of the rows."""
    found = dict.fromkeys(text for text in texts if text in chosen)
    return {text: number for number, text in enumerate(found, 1)}


def _cells(texts: Sequence[str], numbers: dict[str, int]) -> list[Text]:
    return [styled(f"[{numbers[text]}]" if text in numbers else text, DIM) for text in texts]


_PAIRS: Final = ", "
_ROLES: Final = " -"

_USER_HZ: Final = 100  # ticks a second of /proc/*/stat on every Linux that Kata runs on

IDLE: Final = "*"
"""Marks a last pCPU that the thread may no longer use."""


def overview(state: State, output: Output, *, remark: str = "") -> list[Text]:
    """Return the node, one row per sandbox, a remark on their choice, and every warning."""
    lines = [*phrases.head(state, output), Text()]
    if state.sandboxes:
        columns = [
            Column("POD", NAMES, fold=20),
            Column("MASK", CPUS),
            Column(f"vCPU{output.arrow}pCPU", _PAIRS),
            Column("OVERHEAD", ", +"),
            Column("GUEST", optional=1),
            Column("STATE"),
            Column("CHECKED", breaks=""),
        ]
        lines += table(columns, [_summary(sandbox, output) for sandbox in state.sandboxes], output)
    if remark or not state.sandboxes:
        lines += paragraph(Text(remark or "no sandboxes"), output)
    warnings = phrases.notes(state.notes, warnings_only=True)
    for sandbox in state.sandboxes:
        if sandbox.vmm_problem:
            problem = f"! {words.owner(sandbox)}: {sandbox.vmm_problem}"
            warnings.append(styled(problem, phrases.ODD))
        prefix = f"{words.owner(sandbox)}: "
        warnings += phrases.notes(sandbox.notes, prefix, warnings_only=True)
    if warnings:
        lines += [Text(), *(part for w in warnings for part in paragraph(w, output, indent=2))]
    return lines


def single(state: State, output: Output) -> list[Text]:
    """Return everything about the only sandbox of a state document."""
    (sandbox,) = state.sandboxes
    lines = [*phrases.head(state, output), Text(), *_sandbox_facts(sandbox, output), Text()]
    lines += _containers(sandbox, output)
    if sandbox.threads:
        vcpus = {one.tid: one for one in sandbox.guest.vcpus} if sandbox.guest else {}
        lines += [Text(), *_threads(sandbox.threads, vcpus, output)]
    if sandbox.network and sandbox.network.interfaces:
        lines += [Text(), *_interfaces(sandbox.network.interfaces, output)]
    notes = phrases.notes(sandbox.notes)
    if notes:
        lines += [Text(), *(part for note in notes for part in paragraph(note, output, indent=2))]
    return lines


def _summary(sandbox: Sandbox, output: Output) -> list[Text]:
    drifting = phrases.drifting(sandbox.threads)
    return [
        styled(words.owner(sandbox), phrases.NAME),
        phrases.cpus(sandbox.mask),
        phrases.pairs(sandbox.threads, output),
        phrases.overhead(sandbox.threads),
        _guest(sandbox.guest),
        phrases.condition(sandbox.state, f"({drifting})" if drifting else ""),
        Text(words.age(sandbox.checked_s)),
    ]


def _sandbox_facts(sandbox: Sandbox, output: Output) -> list[Text]:
    state = phrases.condition(sandbox.state)
    if sandbox.checked_s is not None:
        state += Text(f", checked {words.age(sandbox.checked_s)} ago")
    if sandbox.duration_ms is not None:
        state += Text(f" in {sandbox.duration_ms:.1f} ms")
    pod = "" if sandbox.pod == sandbox.id else sandbox.pod
    pairs = [
        ("pod", styled(pod, phrases.NAME)),
        ("sandbox", styled(sandbox.id)),
        ("handler", styled(sandbox.handler)),
        ("state", state),
        ("mask", _mask(sandbox, output)),
        ("VMM", _vmm(sandbox, output)),
        (f"vCPU{output.arrow}pCPU", phrases.pairs(sandbox.threads, output)),
        ("overhead", phrases.overhead(sandbox.threads)),
        ("guest", phrases.guest(sandbox.guest) if sandbox.guest else Text()),
        ("quiet", _quiet(sandbox, output)),
        ("memory", phrases.memory_move(sandbox.memory)),
        ("caches", _caches(sandbox, output)),
        ("network", styled(sandbox.network.problem if sandbox.network else "", phrases.ODD)),
        *(("writer", styled(words.writer(one), phrases.ODD)) for one in sandbox.writers),
    ]
    return facts(pairs, output)


def _caches(sandbox: Sandbox, output: Output) -> Text:
    cache = sandbox.cache
    if cache is None:
        return Text()
    parts = [f"class {cache.class_name}"] if cache.class_name else []
    if cache.occupancy_bytes is not None:
        parts.append(f"{phrases.size(cache.occupancy_bytes)} of L3")
    if cache.total_bytes is not None:
        parts.append(f"{phrases.size(cache.total_bytes)} from and to memory")
    if cache.local_bytes is not None:
        parts.append(f"{phrases.size(cache.local_bytes)} of that on the same NUMA node")
    text = styled(output.dot.join(parts))
    if cache.problem:
        text += styled(
            f"{output.dot if parts else ''}not all counted: {cache.problem}", phrases.ODD
        )
    return text if text.plain else styled("counted, no figures yet")


def _quiet(sandbox: Sandbox, output: Output) -> Text:
    quiet = sandbox.quiet
    if quiet is None:
        return Text()
    parts = [f"{quiet.level} on pCPUs {quiet.cpus}" if quiet.cpus else quiet.level]
    if quiet.not_quiet:
        parts.append(f"not on {quiet.not_quiet}")
    if quiet.idle_limit:
        limit = words.IDLE_LIMITS.get(quiet.idle_limit, f"{quiet.idle_limit} us")
        parts.append(f"idle states: {limit}")
    if quiet.governor:
        parts.append(f"governor {quiet.governor}")
    if quiet.managed:
        parts.append(f"{count(quiet.managed, 'managed interrupt')} cannot be moved")
    return styled(output.dot.join(parts), phrases.ODD if quiet.problems else "")


def _guest(guest: Guest | None) -> Text:
    if guest is None:
        return Text(words.NOTHING)
    return styled(guest.state, phrases.GUEST_STYLES.get(guest.state, phrases.DIM))


def _mask(sandbox: Sandbox, output: Output) -> Text:
    parts_of_mask = (("exclusive", sandbox.exclusive), ("shared", sandbox.shared))
    parts = [sandbox.mask or "none"]
    parts += [f"{word} {cpus}" for word, cpus in parts_of_mask if cpus]
    if sandbox.mask_origin:
        parts.append(sandbox.mask_origin)
    return styled(output.dot.join(parts))


def _vmm(sandbox: Sandbox, output: Output) -> Text:
    vmm = sandbox.vmm
    if vmm is None:
        return styled(sandbox.vmm_problem or "none found", phrases.ODD)
    now = sum(thread.role == "vcpu" for thread in sandbox.threads)
    sizes = f"{vmm.boot_vcpus} at boot, {vmm.max_vcpus} at most"
    parts = [
        f"{vmm.kind} {vmm.pid}",
        vmm.exe + (" (replaced on disk)" if vmm.exe_replaced else ""),
        "KVM" if vmm.kvm else "without KVM",
        f"vCPUs {sizes if vmm.boot_vcpus else f'{now} now'}",
        f"confirmed by {vmm.confirmed_by}",
    ]
    if vmm.orphan:
        parts.append("its shim has exited")
    return styled(output.dot.join(parts))


def _containers(sandbox: Sandbox, output: Output) -> list[Text]:
    if not sandbox.containers:
        return [styled("no containers recorded", phrases.ODD)]
    columns = [
        Column("CONTAINER", NAMES, fold=16),
        Column("STATE"),
        Column("CPUS", CPUS),
        Column("EXCLUSIVE", CPUS),
        Column("GUEST", CPUS),
        Column("RECORDED", " :", fold=14, optional=1),
        Column("WHY", fold=16, comfort=24),
    ]
    guest = sandbox.guest
    inside = {one.id: one.cpus or "any" for one in guest.containers} if guest else {}

    def rows(reasons: Sequence[Text]) -> list[list[Text]]:
        found = zip(sandbox.containers, reasons, strict=True)
        return [[*_container(one, inside.get(one.id)), why] for one, why in found]

    reasons = [_why_container(one) for one in sandbox.containers]
    return table_with_footnotes(columns, rows, reasons, output)


def _why_container(container: Container) -> str:
    known = container.provenance != "none"
    why = f"{container.provenance}: {container.reason}" if known else container.reason
    return "; ".join(part for part in (why, container.note) if part)


def _container(container: Container, inside: str | None) -> list[Text]:
    recorded = f"{words.age(container.recorded_s)} ago, {container.source}"
    return [
        styled(container.name, phrases.NAME),
        styled(container.state, phrases.DIM if container.state in words.OVER else ""),
        phrases.cpus(container.cpus),
        phrases.cpus(container.exclusive),
        phrases.cpus(inside),
        styled(recorded, phrases.DIM),
    ]


def _threads(threads: Sequence[Thread], vcpus: dict[int, GuestVcpu], output: Output) -> list[Text]:
    columns = [
        Column("TID", right=True),
        Column("ROLE", _ROLES, fold=10, comfort=16),
        Column("GUEST", right=True, optional=1),
        Column("SOURCE", NAMES, fold=10, comfort=16, optional=4),
        Column("EXPECTED", CPUS),
        Column("AFFINITY", CPUS),
        Column("LAST-CPU", right=True, optional=2),
        Column("CPU-TIME", breaks="", right=True, optional=3),
        Column("RUN-DELAY", breaks="", right=True, optional=5),
        Column("PREEMPTED", right=True, optional=6),
        Column("MIGRATED", right=True, optional=8),
        Column("LAST-MOVE", breaks="", right=True, optional=7),
        Column("STATE"),
        Column("WHY", fold=14, comfort=24),
    ]
    ordered = sorted(threads, key=lambda t: (t.role != "vcpu", t.vcpu or 0, t.role, t.tid))

    def rows(reasons: Sequence[Text]) -> list[list[Text]]:
        found = zip(ordered, reasons, strict=True)
        return [[*_thread(one, vcpus.get(one.tid)), why] for one, why in found]

    lines = table_with_footnotes(columns, rows, [_why_thread(one) for one in ordered], output)
    if any(_idle_since(one) for one in ordered):
        remark = f"{IDLE} has not run since its affinity was set"
        lines += paragraph(styled(remark, phrases.DIM), output, indent=2)
    return lines


def _idle_since(thread: Thread) -> bool:
    """Return whether a thread has not run since its affinity was set.

    The kernel moves a thread that sleeps only when it runs again, so /proc shows the former pCPU.
    """
    return thread.last_cpu >= 0 and thread.last_cpu not in pcpus.parse(thread.affinity)


def _why_thread(thread: Thread) -> str:
    why = [thread.reason]
    if thread.fallback:
        why.append(f"desired {thread.desired}: {thread.fallback}")
    if thread.conflict:
        why.append(f"sources disagree: {thread.conflict}")
    return "; ".join(part for part in why if part)


def _thread(thread: Thread, vcpu: GuestVcpu | None) -> list[Text]:
    role = f"{thread.role} {thread.iothread}" if thread.iothread else thread.label
    drift = thread.state == "drift"
    last = str(thread.last_cpu) if thread.last_cpu >= 0 else words.NOTHING
    return [
        Text(str(thread.tid)),
        styled(role),
        Text(words.NOTHING) if vcpu is None else phrases.guest_cpu(vcpu),
        styled(RoleSource(thread.source).text, phrases.DIM),
        phrases.cpus(thread.expected),
        styled(thread.affinity or words.NOTHING, phrases.BAD if drift else ""),
        Text(f"{IDLE}{last}" if _idle_since(thread) else last),
        Text(f"{thread.cpu_ticks / _USER_HZ:.1f} s"),
        _known(None if thread.run_delay_s is None else f"{thread.run_delay_s:.1f} s"),
        _known(thread.preemptions),
        _known(thread.migrations),
        Text(words.NOTHING if thread.unmoved_s is None else f">{words.age(thread.unmoved_s)}"),
        phrases.condition(thread.state),
    ]


def _known(figure: object | None) -> Text:
    """Return a figure that some kernels do not tell, and that is gone with the thread."""
    return Text("n/a", style=phrases.DIM) if figure is None else Text(str(figure))


def _interfaces(interfaces: Sequence[Interface], output: Output) -> list[Text]:
    columns = [
        Column("INTERFACE", NAMES, fold=12),
        Column("KIND"),
        Column("QUEUES", right=True),
        Column("PEER", NAMES, fold=12),
        Column("SERVED-BY", ", ", fold=12),
    ]
    rows = [
        [
            styled(one.name, phrases.NAME),
            styled(one.kind or words.NOTHING),
            Text(str(one.queues)),
            styled(one.peer or words.NOTHING),
            styled(words.served_by(one) or words.NOTHING),
        ]
        for one in interfaces
    ]
    return table(columns, rows, output)
