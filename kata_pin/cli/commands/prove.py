"""`kata-pin prove`: measures who runs on exclusive pCPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from kata_pin.cli.options import (
    FiniteNumber,
    complete_sandbox,
    global_options,
    in_namespace,
    time_span,
)
from kata_pin.cli.render import screen
from kata_pin.cli.session import Session

EXIT_STATUSES: Final = {"proved": 0, "violated": 3, "unproved": 4}

MOST_S: Final = 86400


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@in_namespace
@click.option(
    "--for",
    "seconds",
    metavar="SPAN",
    callback=time_span,
    default="60s",
    show_default=True,
    help="Length of the measurement, such as 10s or 5m.",
)
@click.option(
    "--max-foreign",
    "max_foreign",
    metavar="PCT",
    type=FiniteNumber(0, 100),
    default=0.0,
    show_default=True,
    help="Share of a pCPU's time, in percent, that foreign tasks may have.",
)
@click.option(
    "--method",
    type=click.Choice(["perf", "hist", "schedstat", "wait"]),
    help="Measure by this method alone.  [default: the first of them that works]",
)
@click.option("--irq", is_flag=True, help="Also measure interrupts by name.")
@click.option(
    "--guest", is_flag=True, help="Also measure what the guest feels: steal, waits, exits, polling."
)
@click.option(
    "--html", metavar="FILE", type=click.Path(), help="Also write an HTML page; - is stdout."
)
@global_options
@click.pass_obj
def prove(
    session: Session,
    sandbox: str | None,
    *,
    namespace: str | None,
    seconds: int,
    max_foreign: float,
    method: str | None,
    irq: bool,
    guest: bool,
    html: str | None,
) -> int:
    """Measure whether exclusive pCPUs run nothing but their owner's threads.

    Records every task switch on the exclusive pCPUs of SANDBOX, or of all sandboxes, and lists each
    other task that ran there, how long, and what keeps it away. Kernel threads that belong to a
    pCPU are unavoidable: they are listed, and are no violation. An incomplete measurement (lost
    records, a pCPU that went offline) proves nothing. Needs root.

    Without perf, the kernel's histograms (tracefs) still name the tasks; its counters
    (/proc/schedstat, schedstat) only show how long others ran on a pCPU.

    --guest adds each vCPU's steal time, its longest wait for its pCPU, the times that it was
    outside its guest, and what ran on its pCPU meanwhile; and the command lines that measure
    inside the guest with cyclictest and oslat, if the container's image has them.

    Exit status: 0 proved, 3 violated, 4 unproved or not measured.
    """
    from kata_pin.base.config.options import function_of
    from kata_pin.base.values import Method
    from kata_pin.cli.reports import prove as proving
    from kata_pin.cli.reports.words import meant
    from kata_pin.linux.files import HostRoot

    if not 1 <= seconds <= MOST_S:
        raise click.BadParameter("expected 1s to 1d", param_hint="--for")
    provider = session.connect()
    with _not_measured():
        names = () if sandbox is None and namespace is None else provider.names()
    about = meant(names, sandbox, namespace)
    if html is not None and html != "-":
        screen.expect_writable(html)  # so that it does not fail after a minute
    methods = (Method(method),) if method else tuple(Method)
    wanted = proving.ProofRequest(about, seconds, max_foreign, irq, methods, guest)
    with _not_measured(), screen.progress("measuring", seconds) as done:

        def progress(share: float) -> None:
            done(share * seconds, "measuring")

        root = HostRoot(debugfs=session.config.paths.debugfs)
        document = proving.prove(provider.state, wanted, root=root, progress=progress)
    if html is not None:
        page = function_of("kata_pin.options.pictures.page:proof_document")
        screen.write(html, page(document, provider.state()))
    if html != "-":
        screen.report(document, json=session.json, by="cli.render.prove:prove")
    return EXIT_STATUSES[document.verdict]


@contextmanager
def _not_measured() -> Iterator[None]:
    """Make what could not be measured exit as unproved: monitoring goes by the exit status."""
    from kata_pin.base.errors import DaemonError, HostError, RemoteProtocolError

    try:
        yield
    except (DaemonError, HostError, RemoteProtocolError) as error:
        error.exit_code = EXIT_STATUSES["unproved"]
        raise
