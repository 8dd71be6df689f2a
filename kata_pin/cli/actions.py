"""What `show`, `pin` and `unpin` do once their words are known, by click or by quick.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from msgspec.structs import replace

from kata_pin.base.values import count
from kata_pin.cli.render import screen
from kata_pin.cli.session import Session, ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from kata_pin.base.documents.measured import MemoryDocument
    from kata_pin.base.documents.state import State
    from kata_pin.cli.quick import Plain

VIEWS: Final = {
    "overview": "cli.render.show:overview",
    "single": "cli.render.show:single",
    "cpus": "cli.render.cpus:cpus",
    "memory": "options.memory.report:memory_memory",
}
"""The function that makes the lines of each view."""


def act(plain: Plain) -> int:
    """Run the action that a command line names; return the exit status."""
    session = Session(plain.config)
    session.json = plain.json
    verb, name = plain.words[0], "".join(plain.words[1:]) or None

    def run() -> int:
        if verb == "show":
            show(session, name, "single" if name else "overview")
            return 0
        return change(session, "pin" if verb == "pin" else "unpin", name)

    return ended(session, run)


def show(
    session: Session,
    name: str | None,
    view: str,
    namespace: str | None = None,
    *,
    problems: bool = False,
    clear: Callable[[], None] | None = None,
) -> None:
    """Print a view of the sandboxes asked for; `clear` empties the screen before."""
    state, remark = _found(session, name, namespace, problems=problems)
    found = _read(state, view, exact=name is not None)
    if clear is not None:
        clear()
    given = {"remark": remark} if remark and view != "memory" else {}
    screen.report(found, json=session.json, by=VIEWS[view], **given)


def _read(state: State, view: str, *, exact: bool) -> State | MemoryDocument:
    """Return the state with what the command line reads itself, or the memory document."""
    if view == "overview":
        return state
    if view == "single":
        from kata_pin.cli.reports.activity import with_activity, with_network

        return with_activity(with_network(state))
    from kata_pin.base.config.options import function_of

    if view == "memory":
        found: MemoryDocument
        found = function_of("kata_pin.options.memory.report:memory")(state, exact=exact)
        return found
    return replace(state, quiet=function_of("kata_pin.options.quiet.disturbance:read_quiet")(state))


def _found(
    session: Session, name: str | None, namespace: str | None, *, problems: bool
) -> tuple[State, str]:
    """Return the state of the sandboxes asked for, and what to say of the choice."""
    provider = session.connect()
    state = provider.state_of(name, namespace)
    if name is not None or not (problems or namespace):
        return state, ""
    from kata_pin.cli.reports.words import has_problem, safe, within

    inside = within(state.sandboxes, namespace)
    chosen = [one for one in inside if has_problem(one)] if problems else inside
    every = count(len(inside), "sandbox", "sandboxes")
    if namespace:
        every += f" in namespace {safe(namespace)}"
    remark = "" if inside else f"no{every[1:]}"
    if inside and problems:
        verb = "has" if len(chosen) == 1 else "have"
        remark = (
            f"{len(chosen)} of {every} {verb} problems" if chosen else f"no problems in {every}"
        )
    return replace(state, sandboxes=tuple(chosen)), remark


def change(session: Session, verb: Literal["pin", "unpin"], name: str | None) -> int:
    """Set or restore affinities and print what was done; return the exit status."""
    document = session.connect().change(verb, name)
    screen.report(document, json=session.json, by="cli.render.reports:applied")
    refused = {"refused", "denied", "unverified"}
    outcomes = {r.outcome for one in document.sandboxes for r in one.results}
    return 1 if outcomes & refused or document.options_failed else 0
