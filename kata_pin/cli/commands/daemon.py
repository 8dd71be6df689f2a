"""Commands of a few lines: run, reload, completion, pin, unpin and bind."""

from __future__ import annotations

import sys

import click

from kata_pin.base.cpuset import CpuSet
from kata_pin.cli.actions import change
from kata_pin.cli.options import complete_sandbox, cpu_list, global_options, time_span
from kata_pin.cli.render import screen
from kata_pin.cli.session import Session


@click.command()
@global_options
@click.pass_obj
def run(session: Session) -> None:
    """Run the daemon in the foreground.

    SIGHUP reloads the configuration. SIGTERM stops the daemon; all affinities are kept, and
    kata-pin unpin restores them.
    """
    if not session.config.added:
        _import_lightly()
    from kata_pin.service.app import serve
    from kata_pin.service.configuration import load

    serve(session.config, lambda: load(session.config_file), debug=session.debug)


def _import_lightly() -> None:
    """Import asyncio and shutil as where Python has no OpenSSL, bz2 and lzma: 4 MiB less.

    The daemon's own requests over TLS are made in threads (peers/http.py), where `ssl` is imported
    as usual; it has no archives. Options of other packages may, so with them all is imported.
    """
    unused = [name for name in ("ssl", "bz2", "lzma") if name not in sys.modules]
    for name in unused:
        sys.modules[name] = None  # type: ignore[assignment] # importing it raises ImportError
    import asyncio  # noqa: F401
    import shutil  # noqa: F401

    for name in unused:
        del sys.modules[name]


@click.command()
@global_options
@click.pass_obj
def reload(session: Session) -> None:
    """Have the daemon read its configuration again.

    Exit status 1 if it refuses the file; the previous settings stay in force. `systemctl reload
    kata-pin` runs this, so it fails then too.
    """
    session.connect().reload()


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell's completion script.

    `install` puts the scripts where the shells look for them; for another place: kata-pin
    completion bash > FILE. Sandboxes are completed while the daemon runs.
    """
    from kata_pin.cli.node import files

    click.echo(files.completion(shell), nl=False)


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@global_options
@click.pass_obj
def pin(session: Session, sandbox: str | None) -> int:
    """Set the affinities of one sandbox, or of all, now.

    Without a daemon they are set once, from /proc and Kata's state. Exit status 1 if the kernel
    refused an affinity.
    """
    return change(session, "pin", sandbox)


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@global_options
@click.pass_obj
def unpin(session: Session, sandbox: str | None) -> int:
    """Restore the original affinities of one sandbox, or of all.

    Each thread gets the affinity that was first seen for its role, else that of pid 1. The daemon
    does not manage such a sandbox until `pin`, even after a restart.
    """
    return change(session, "unpin", sandbox)


@click.command()
@click.argument("sandbox", metavar="POD", required=False, shell_complete=complete_sandbox)
@click.option("--vcpu", "vcpus", metavar="VCPUS", callback=cpu_list, help="vCPUs, such as 0-3.")
@click.option("--cpus", metavar="CPUS", callback=cpu_list, help="Their pCPUs, such as 4-7.")
@click.option(
    "--overhead",
    metavar="CPUS",
    callback=cpu_list,
    help="pCPUs of all other threads.  [default: as the settings say]",
)
@click.option(
    "--for", "for_s", metavar="SPAN", callback=time_span, help="End it after SPAN, such as 10m."
)
@click.option("--dry-run", is_flag=True, help="Show what would be set; set nothing.")
@click.option("--clear", is_flag=True, help="End the binding of POD, or of all.")
@global_options
@click.pass_obj
def bind(
    session: Session,
    sandbox: str | None,
    *,
    vcpus: CpuSet | None,
    cpus: CpuSet | None,
    overhead: CpuSet | None,
    for_s: int | None,
    dry_run: bool,
    clear: bool,
) -> None:
    """Bind vCPUs of a running VM to pCPUs that you name.

    As many pCPUs as vCPUs are dealt one to one, in order; otherwise each vCPU may use all of them.
    The binding overrides pairs and the settings `vcpus` and `overhead`. It is refused if a pCPU is
    exclusive to another pod, offline, or not in the cgroup of a thread, and it ends as a whole as
    soon as one of these comes true, one affinity cannot be set, or its time ends: then all threads
    are placed as before. It outlives a restart of the daemon. Needs the daemon.
    """
    if clear and (dry_run or any(one is not None for one in (vcpus, cpus, overhead, for_s))):
        raise click.UsageError("--clear takes no other option")
    if overhead is not None and not overhead:
        raise click.BadParameter("names no pCPU", param_hint="--overhead")
    if for_s is not None:
        from kata_pin.base.placement import MOST_BOUND_S

        if not 1 <= for_s <= MOST_BOUND_S:
            raise click.BadParameter("expected 1s to 30d", param_hint="--for")
    if not clear and not (sandbox and vcpus and cpus):
        raise click.UsageError("give POD, --vcpu and --cpus, or --clear")
    given: dict[str, str | int | None] = {"clear": True}
    if not clear:
        named = {"vcpus": vcpus, "cpus": cpus, "overhead": overhead}
        given = {name: str(one) for name, one in named.items() if one}
        given |= {"for_s": for_s, "dry_run": dry_run}
    document = session.connect().bind(sandbox, given)
    screen.report(document, json=session.json, by="cli.render.reports:bind")
