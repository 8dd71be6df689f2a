"""`kata-pin show`."""

from __future__ import annotations

import re
import time
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import click
from msgspec.structs import replace

from kata_pin.base.values import count
from kata_pin.cli.options import (
    FiniteNumber,
    Session,
    complete_sandbox,
    global_options,
    in_namespace,
)
from kata_pin.cli.render import screen
from kata_pin.cli.reports.words import safe

if TYPE_CHECKING:
    from kata_pin.base.documents.measured import MemoryDocument
    from kata_pin.base.documents.state import State


REFRESH_S: Final = "2"
"""Seconds between two refreshes of --watch, unless the user says otherwise."""

VIEWS: Final = {
    "overview": "cli.render.show:overview",
    "single": "cli.render.show:single",
    "cpus": "cli.render.cpus:cpus",
    "memory": "options.memory.report:memory_memory",
}
"""The function that makes the lines of each view."""


class Watching(click.Command):
    """A command whose option --watch may stand without a number, also before an argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give a bare --watch its default; click would take the next argument for the number."""
        given = []
        for word, following in zip_longest(args, args[1:], fillvalue=""):
            bare = word == "--watch" and not re.fullmatch(r"[0-9.]+", following)
            given.append(f"--watch={REFRESH_S}" if bare else word)
        return super().parse_args(ctx, given)


@click.command(cls=Watching)
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@click.option("--cpus", is_flag=True, help="One row per pCPU, grouped by NUMA node and core.")
@click.option("--memory", is_flag=True, help="Memory per NUMA node, beside the nodes of the vCPUs.")
@in_namespace
@click.option("--problems", is_flag=True, help="Only sandboxes that are not ok or have a warning.")
@click.option(
    "--watch",
    metavar="[SECONDS]",
    type=FiniteNumber(0.2, 3600),
    help=f"Refresh every SECONDS seconds ({REFRESH_S} if not given) until Ctrl-C.",
)
@global_options
@click.pass_obj
def show(
    session: Session,
    *,
    sandbox: str | None,
    cpus: bool,
    memory: bool,
    namespace: str | None,
    problems: bool,
    watch: float | None,
) -> None:
    """Show the sandboxes of this node, one of them, or its pCPUs.

    Without SANDBOX: one line per sandbox with its mask, the affinities of its vCPUs and of its
    overhead threads, its state and the age of the last check. `!` marks drift. With SANDBOX (an id
    or its start, a pod's name, or namespace/name): its containers, threads and network interfaces.
    With --cpus interrupts and other kernel work on exclusive pCPUs are counted for 1 s. With
    --memory and SANDBOX the memory map of its VMM is read, which takes 12 ms per GiB.
    """
    if problems and (sandbox is not None or cpus):
        raise click.UsageError("--problems chooses sandboxes: give neither SANDBOX nor --cpus")
    if cpus and memory:
        raise click.UsageError("give either --cpus or --memory")
    if cpus and namespace is not None and sandbox is None:
        raise click.UsageError("--cpus shows all pCPUs of the node: -n cannot limit it")
    view = "memory" if memory else "cpus" if cpus else "single" if sandbox else "overview"
    while True:
        state, remark = _found(session, sandbox, namespace, problems=problems)
        found = _read(state, view, exact=sandbox is not None)
        if watch is not None:
            click.clear()
        given = {"remark": remark} if remark and not memory else {}
        screen.report(found, json=session.json, by=VIEWS[view], **given)
        if watch is None:
            return
        time.sleep(watch)


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
    state = provider.state(provider.chosen(name, namespace))
    if name is not None or not (problems or namespace):
        return state, ""
    from kata_pin.cli.reports.words import has_problem, within

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
