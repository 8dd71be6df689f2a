"""`kata-pin show`."""

from __future__ import annotations

import re
import time
from itertools import zip_longest
from typing import Final

import click

from kata_pin.cli import actions
from kata_pin.cli.options import FiniteNumber, complete_sandbox, global_options, in_namespace
from kata_pin.cli.session import Session

REFRESH_S: Final = "2"
"""Seconds between two refreshes of --watch, unless the user says otherwise."""


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
    clear = None if watch is None else click.clear
    while True:
        actions.show(session, sandbox, view, namespace, problems=problems, clear=clear)
        if watch is None:
            return
        time.sleep(watch)
