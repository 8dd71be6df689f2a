"""What the state document has of quiet pCPUs, as of the keeper's last round."""

from __future__ import annotations

from collections.abc import Iterator

from kata_pin.daemon.quiet.status import QuietStatus
from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.placement import Note, NoteLevel
from kata_pin.model.reports.quiet import KeptQuiet, QuietSandbox, QuietSpared
from kata_pin.model.settings import QuietLevel


def kept_quiet(status: QuietStatus) -> KeptQuiet | None:
    """Return the node's part; None where nothing is kept quiet and nothing is to be restored."""
    state = status.state
    if not status.acts:
        return None
    return KeptQuiet(
        level=status.level,
        cpus=str(state.quiet),
        full=str(state.full),
        crio=str(state.crio),
        spared=tuple(QuietSpared(one.cpu, one.reason) for one in state.spared),
        changed={kind.value: count for kind, count in sorted(status.held.items())},
        failed_writes={kind.value: count for kind, count in sorted(status.failed.items())},
        managed=status.managed_on(state.quiet),
        movable_fired=status.movable_fired,
        managed_fired=status.managed_fired,
        irqbalance=status.irqbalance if state.quiet else (),
        left=tuple(one.label or str(one.key) for one in status.outcome.left),
        problems=status.problems,
    )


def quiet_sandbox(status: QuietStatus, sandbox_id: str, exclusive: CpuSet) -> QuietSandbox | None:
    """Return a sandbox's part; `exclusive` are its exclusive pCPUs."""
    if not status.acts or not exclusive:
        return None
    claim = next((one for one in status.claims if one.sandbox == sandbox_id), None)
    state = status.state
    quiet = claim.cpus & state.quiet if claim is not None else EMPTY
    level = QuietLevel.OFF
    if quiet:
        level = QuietLevel.FULL if quiet & state.full else QuietLevel.IRQ
    return QuietSandbox(
        level=level.value,
        cpus=str(quiet),
        not_quiet=str(exclusive - quiet),
        idle_limit=claim.idle if claim is not None else "",
        governor=claim.governor if claim is not None else "",
        managed=status.managed_on(quiet),
        problems=tuple(_problems(status, sandbox_id)),
    )


def quiet_notes(status: QuietStatus, sandbox_id: str) -> Iterator[Note]:
    """Yield what an operator should know of a sandbox's quiet pCPUs."""
    for why in _problems(status, sandbox_id):
        yield Note("quiet", why, NoteLevel.WARNING)


def node_notes(status: QuietStatus) -> Iterator[Note]:
    """Yield what could not be written, one note per reason."""
    by_reason: dict[str, list[str]] = {}
    for problem in status.problems:
        what, _, why = problem.rpartition(": ")
        by_reason.setdefault(why, []).append(what)
    for why, failed in by_reason.items():
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        text = f"quiet pCPUs: cannot set {failed[0]}{more}: {why}; kata-pin doctor names the remedy"
        yield Note("quiet-failed", text, NoteLevel.WARNING)


def _problems(status: QuietStatus, sandbox_id: str) -> Iterator[str]:
    yield from status.refusals.get(sandbox_id, ())
    wanted = union(one.cpus for one in status.claims if one.sandbox == sandbox_id)
    for one in status.state.spared:
        if one.cpu in wanted:
            yield f"pCPU {one.cpu} is not quiet: {one.reason}"
