"""`kata-pin draw`: read-only."""

from __future__ import annotations

from importlib import import_module

import click

from kata_pin.cli.options import Session, global_options, measured_for
from kata_pin.cli.render import screen


@click.command()
@click.option("--svg", metavar="FILE", type=click.Path(), help="Write an SVG picture; - is stdout.")
@click.option("--html", metavar="FILE", type=click.Path(), help="Write an HTML page; - is stdout.")
@measured_for
@global_options
@click.pass_obj
def draw(session: Session, *, svg: str | None, html: str | None, seconds: int | None) -> None:
    """Draw this node: each pCPU with its owner and what runs there.

    Packages, NUMA nodes, last-level caches and cores as boxes; in them each pCPU with the key of
    its owner and its threads' roles, exclusive, shared, reserved, housekeeping, free and offline
    ones by sign and border. `!` marks findings of check, and a share what others ran on exclusive
    pCPUs while they were measured. With --svg or --html a file is written instead, which needs
    nothing else.
    """
    state = session.provider.state()
    if session.json:
        screen.document(state)
        return
    from kata_pin.cli.reports import foreign
    from kata_pin.cli.reports.prove import Wanted

    limits = session.config.isolation
    span = limits.check_s if seconds is None else seconds
    looked = foreign.look(state, session.provider.state, Wanted(None, span, limits.max_foreign))
    if svg is None and html is None:
        from kata_pin.cli.render.drawing import terminal

        screen.show(terminal.draw(state, screen.output(), looked))
    for file, renderer in ((svg, "svg"), (html, "page")):
        if file is not None:
            module = import_module(f"kata_pin.cli.render.drawing.{renderer}")
            screen.write(file, module.document(state, looked))
