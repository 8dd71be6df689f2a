"""`kata-pin check`: read-only; for people and for monitoring, which goes by its exit status."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click

from kata_pin.cli.options import (
    Session,
    complete_sandbox,
    global_options,
    in_namespace,
    measured_for,
)
from kata_pin.cli.render import screen

if TYPE_CHECKING:
    from kata_pin.model.reports.check import CheckDocument

STATUSES: Final = {"ok": 0, "findings": 3, "unknown": 4}
"""Exit status by verdict."""


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@in_namespace
@measured_for
@global_options
@click.pass_obj
def check(session: Session, sandbox: str | None, namespace: str | None, seconds: int | None) -> int:
    """Check affinities, and who runs on exclusive pCPUs.

    Without SANDBOX of all sandboxes. Exit status 3 on drift, on an exclusive pCPU of two sandboxes,
    if user processes or other sandboxes ran on one longer than `isolation.max_foreign` allows and,
    with `intruders: fail`, if they may run on one. Exit status 4 without findings if it could not
    tell: no permission, or the daemon is dead or does not answer. `kata-pin prove` measures longer
    and shows everything that ran.
    """
    document = _checked(session, sandbox, namespace, seconds)
    screen.report(document, json=session.json, by="reports:check")
    return STATUSES[document.verdict]


def _checked(
    session: Session, sandbox: str | None, namespace: str | None, seconds: int | None
) -> CheckDocument:
    """Return the document; raises KataPinError for a name that fits nothing, ConfigError."""
    from kata_pin.cli.reports import findings, foreign, intruders, owners, processes
    from kata_pin.cli.reports.prove import Wanted
    from kata_pin.cli.reports.selection import choose, within
    from kata_pin.config.tree import Intruders
    from kata_pin.errors import ConfigError, DaemonError, KataPinError
    from kata_pin.model.reports.names import SandboxName

    settings, provider = session.config, session.provider
    try:
        state = provider.state()
    except ConfigError:
        raise
    except KataPinError as error:
        return findings.could_not_tell(str(error))
    about = None
    if sandbox is not None or namespace is not None:
        names = within((SandboxName(one.id, one.pod) for one in state.sandboxes), namespace)
        about = {one.id for one in ([choose(names, sandbox)] if sandbox else names)}
    unknown = []
    if not state.daemon.running:
        how = "hangs" if state.daemon.silent else "is not running"
        unknown.append(f"the daemon {how}, state read from /proc ({state.daemon.reason})")
    hidden = processes.why_hidden()
    limits = settings.isolation
    wanted = Wanted(about, limits.check_s if seconds is None else seconds, limits.max_foreign)
    looked = foreign.look(state, provider.state, wanted)
    if wanted.seconds > 0 and state.daemon.running:
        with suppress(DaemonError):  # it ended, or is older than the watch
            owned = owners.owners(state, about)
            looked = foreign.with_watch(looked, provider.watch(), owned, foreign.may_still_run)
    return findings.check(
        state,
        () if hidden else intruders.groups(state, about, looked.ran_ms),
        intruders_fail=settings.intruders is Intruders.FAIL,
        about=about,
        looked=looked,
        unknown=[*unknown, *([hidden] if hidden else [])],
    )
