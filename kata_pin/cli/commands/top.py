"""`kata-pin top`."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import click

from kata_pin.cli.options import (
    Number,
    Session,
    complete_sandbox,
    global_options,
    in_namespace,
)
from kata_pin.cli.render import screen

if TYPE_CHECKING:
    from kata_pin.cli.reports.top import Meter
    from kata_pin.model.reports.state import State

INTERVAL_S: Final = 2.0

FIRST_S: Final = 0.5
"""Length of the first sample on a terminal, so that it does not stay empty for long."""

SPARE: Final = 128
"""Descriptors that are not for files of threads."""


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@in_namespace
@click.option(
    "--interval",
    metavar="SECONDS",
    type=Number(0.5, 3600),
    default=INTERVAL_S,
    help=f"Seconds between two samples.  [default: {INTERVAL_S:g}]",
)
@click.option("--once", is_flag=True, help="Print one sample and exit, as without a terminal.")
@click.option("--threads", is_flag=True, help="Show overhead threads one by one.")
@global_options
@click.pass_obj
def top(
    session: Session,
    *,
    sandbox: str | None,
    namespace: str | None,
    interval: float,
    once: bool,
    threads: bool,
) -> None:
    """Show live what sandboxes and their exclusive pCPUs do.

    Per vCPU: CPU time, time that it had to wait for a pCPU (steal, for its guest), preemptions and
    migrations. Per exclusive pCPU: its owner's and foreign use, and interrupts. Nothing is changed.
    With --json one document per line and sample until Ctrl-C. h shows the keys.
    """
    from kata_pin.cli.reports.top import Meter
    from kata_pin.host.measure.sampler import Sampler
    from kata_pin.host.root import HOST

    chosen = session.provider.chosen(sandbox, namespace)

    def ask() -> State:
        state = session.provider.state(chosen)
        if namespace is None:
            return state
        from kata_pin.cli.reports.selection import within

        return replace(state, sandboxes=tuple(within(state.sandboxes, namespace)))

    with closing(Meter(ask, Sampler(HOST, _room()), threads=threads)) as meter:
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if session.json or once or not terminal:
            _print(session, meter, interval, once=once or not session.json)
        else:
            _interact(meter, interval)


def _room() -> int:
    """Return how many descriptors may be kept open, after allowing as many as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(0, most - SPARE)


def _print(session: Session, meter: Meter, interval: float, *, once: bool) -> None:
    """Print samples, one after the other."""
    while True:
        time.sleep(interval)
        found = meter.document()
        if session.json:
            import json

            from kata_pin.wire.reports import as_data

            sys.stdout.write(json.dumps(as_data(found)).replace("\x7f", "\\u007f") + "\n")
        else:
            screen.report(found, json=False, by="top:once")
        sys.stdout.flush()
        if once:
            return


def _interact(meter: Meter, interval: float) -> None:
    """Show samples on the whole terminal until `q`."""
    from kata_pin.cli.render.layout import Output
    from kata_pin.cli.render.top import rows
    from kata_pin.cli.render.top import screen as frame
    from kata_pin.cli.reports.top_view import View, keys
    from kata_pin.cli.terminal import Screen

    colours, unicode = screen.colours(), screen.output().unicode
    view = View(threads=meter.threads)
    time.sleep(min(interval, FIRST_S))
    document = meter.document()
    due = time.monotonic() + interval
    with Screen() as terminal:
        while not view.ended:
            width, height = terminal.size()
            output, page = Output(width, unicode=unicode), max(1, height - 8)
            view = view.bounded(rows(document, view, output), page)
            terminal.draw(frame(document, view, output, height), colours=colours)
            typed = terminal.read(due - time.monotonic())
            for key in keys(typed or ""):
                view = view.pressed(key, page)
            meter.expand(threads=view.threads)
            if time.monotonic() >= due:
                due = time.monotonic() + interval
                if not view.paused:
                    document = meter.document()
