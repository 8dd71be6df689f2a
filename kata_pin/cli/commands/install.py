"""`kata-pin install`, `uninstall` and `release`."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import click

from kata_pin.base.config.tree import Config
from kata_pin.base.documents.answers import Applied, FileChange, FilesDocument
from kata_pin.base.errors import KataPinError, StateError
from kata_pin.cli.client import WRITE_S, probe
from kata_pin.cli.node import containerd as containerd_files
from kata_pin.cli.node.changes import MODIFIED, NAMED_BY, NodeFiles, line
from kata_pin.cli.node.files import (
    CONTAINERD_FRAGMENT,
    DROP_IN,
    HOOK_PATH,
    PROGRAM_LINK,
    SPECS,
    UNIT,
    Choices,
    NodeFile,
    NodeLink,
    Runtime,
    containerd_hooks,
    node_files,
    registers_hook,
    serves_containerd,
)
from kata_pin.cli.options import global_options, time_span
from kata_pin.cli.render import screen
from kata_pin.cli.reports.words import safe
from kata_pin.cli.session import Session
from kata_pin.service.configuration import DEFAULT_FILE, load
from kata_pin.service.exchange import DaemonAway, DaemonSilent
from kata_pin.service.protocol import ask, decode

# Install writes the hook, its hooks.d files, the service, sample settings, the man page, the JSON
# documents' description, completions and a link in PATH. Uninstall first keeps new containers from
# running the hook, then restores all affinities (D18), then removes the rest. With --root, for
# packagers, nothing outside it is read, written or asked.

HOMES: Final = ("/home/", "/root/")
"""Where the service sees nothing: ProtectHome= of its unit."""

NEXT_STEPS = """\
next:
  systemd-sysusers && systemd-tmpfiles --create kata-pin.conf
  systemctl daemon-reload && systemctl enable --now kata-pin
  kata-pin doctor"""

BY_HAND: Final = (
    f"containerd: merge the hooks of {CONTAINERD_FRAGMENT} into the base runtime spec of each\n"
    "handler of Kata, as HOOKS in kata-pin(8) says"
)
NO_HOOKS: Final = (
    "no hooks installed: a runtime with NRI needs none; for others use --crio, --podman or\n"
    "--containerd"
)
NO_KATA: Final = "containerd has no runtime handler of Kata: name one with --handler"

Release = Callable[[Config], Applied]
"""Restores every affinity when no daemon runs."""


def release_pins(config: Config, release_all: Release) -> str:
    """Restore every affinity, by the daemon or, without one, by `release_all`; return a remark.

    Raises KataPinError, also for a daemon that does not answer: two writers must not race; and
    StateError if an option failed to restore what it changed, once all the others had their turn.
    """
    try:
        path = os.path.join(config.runtime_dir, "control.sock")
        probe(path)
        answer = ask(path, "release", {}, WRITE_S)
        document, by = decode(answer, Applied), "by the daemon"
    except DaemonAway:
        document, by = release_all(config), "no daemon is running"
    if document.options_failed:
        failed = "; ".join(document.options_failed)
        raise StateError(f"not all that options changed is restored: {failed}")
    kept = [safe(f"not restored: {one}") for one in document.quiet_kept]
    return "\n".join([*restored(document, by), *kept_cpusets(document), *kept])


def restored(document: Applied, by: str) -> list[str]:
    """Return the lines about affinities: that all were restored, or what was not and why."""
    left = [
        safe(f"  {sandbox.pod}: {note.text}")
        for sandbox in document.sandboxes
        for note in sandbox.notes
    ]
    if not left:
        return [f"restored all affinities ({by})"]
    return [f"restored affinities ({by}), except:", *left]


def kept_cpusets(document: Applied) -> list[str]:
    """Return the lines about containers that keep a cpuset of the allocator."""
    kept = document.cpusets_kept
    if not kept:
        return []
    head = "these containers keep the CPUs that kata-pin gave them until their pods are recreated:"
    return [head, *(safe(f"  {one.pod} {one.name} {one.cpus}") for one in kept)]


def uninstall_node(root: str, release: Callable[[], str]) -> tuple[list[FileChange], str]:
    """Remove kata-pin from the node below `root`; `release` restores the affinities in between.

    First what makes runtimes run the hook, then the affinities, then all else: if the release
    fails, the service and its settings are still there for another attempt.
    """
    node = NodeFiles(root)
    changes = node.uninstall(registers_hook)
    released = release()
    return list(dict.fromkeys([*changes, *node.uninstall()])), released


def last_steps(changes: Sequence[FileChange], program: str) -> list[str]:
    """Return what is left to do after the files are gone, in its order, and what will be seen."""
    removed = {change.path for change in changes if change.verb == "removed"}
    kept = [change for change in changes if change.verb == "kept" and change.reason != MODIFIED]
    steps = []
    if UNIT in removed:
        steps.append("systemctl disable --now kata-pin; systemctl daemon-reload")
    named = {one.reason.removeprefix(NAMED_BY) for one in kept if one.reason.startswith(NAMED_BY)}
    if named:
        where = ", ".join(sorted(named))
        steps.append(f"remove the lines base_runtime_spec = {SPECS}... from {where}")
    if any(serves_containerd(one.path) or one.path == HOOK_PATH for one in kept):
        steps += [containerd_files.RESTART, f"{program} uninstall, which removes the files kept"]
    lines = [f"  {number}. {step}" for number, step in enumerate(steps, 1)]
    said = ["\n".join(["next:", *lines])] if lines else []
    if HOOK_PATH in removed:
        said.append(
            "containers that started before log `hook error ... no such file or directory` when\n"
            "they end, which does no harm"
        )
    return said


def install_plan(
    node: NodeFiles,
    files: Sequence[NodeFile | NodeLink],
    plan: containerd_files.Plan,
    run: containerd_files.Run,
) -> tuple[list[FileChange], list[str]]:
    """Install `files` and those of the plan; return the changes, and what is left to do.

    At an error the drop-in is removed: the next restart of containerd would have read it. Raises
    KataPinError, which says so.
    """
    try:
        containerd_files.check_specs(node.would_keep(plan.spec_files))
        changes = node.install([*files, *plan.files])
        return changes, containerd_files.next_steps(plan, run)
    except (KataPinError, KeyboardInterrupt) as error:
        removed = node.uninstall(lambda path: os.path.basename(path) == DROP_IN)
        if not removed or isinstance(error, KeyboardInterrupt):
            raise
        said = "; ".join(map(line, removed))
        raise KataPinError(f"{error.message}; {said}", hint=error.hint) from error


def check_programs(choices: Choices) -> None:
    """Raise KataPinError unless the programs that the files name are executable here.

    The service sees no home directory (ProtectHome= of its unit).
    """
    interpreter = os.path.join(os.path.dirname(choices.program), "python")  # of its environment
    for path in (choices.program, interpreter, choices.config_file):
        real = os.path.realpath(path)
        if real.startswith(HOMES):
            raise KataPinError(
                f"the service cannot see {real}: home directories are hidden from it",
                hint="install kata-pin below /opt with the system's Python (--program, --config)",
            )
    for option, path in (("--python", choices.python), ("--program", choices.program)):
        if not os.access(path, os.X_OK):
            raise KataPinError(
                f"{path} is not an executable file", hint=f"give its path with {option}"
            )


def program_file(given: str | None) -> str:
    """Return the path of the program, not of the link that an earlier `install` made to it.

    Raises KataPinError for a relative path: the service runs in another folder.
    """
    if given is None:
        found = os.path.join(sysconfig.get_path("scripts"), "kata-pin")
        given = found if os.path.exists(found) else PROGRAM_LINK  # a package's
    if not os.path.isabs(given):
        raise KataPinError(
            f"--program {given} is not an absolute path", hint="give it as on the node"
        )
    return os.path.realpath(given) if given == PROGRAM_LINK else given


def settings_file(root: str, given: str | None) -> str:
    """Return the path of the settings as the service opens it, whose folder is another.

    Raises KataPinError for a relative path below another root, where nothing says relative to what.
    """
    if given is None or os.path.isabs(given):
        return given or DEFAULT_FILE
    if root != "/":
        raise KataPinError(
            f"--config {given} is not an absolute path", hint="with --root give it as on the node"
        )
    return os.path.abspath(given)


def settings_below(root: str, config_file: str) -> Config:
    """Return the settings of the node below `root`; the defaults when it has none yet."""
    return load(default=os.path.join(root, config_file.lstrip("/")))


def is_before(release: str, version: tuple[int, int]) -> bool:
    """Whether a kernel's release (uname -r) is older than a version; one that is no number is."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is None or (int(found[1]), int(found[2])) < version


@click.command()
@click.option("--root", default="/", metavar="DIR", help="Install below DIR (for packages).")
@click.option("--crio", is_flag=True, help="Install hooks for all containers of CRI-O.")
@click.option("--podman", is_flag=True, help="Install hooks for annotated containers of podman.")
@click.option("--containerd", is_flag=True, help="Install hooks for Kata's handlers of containerd.")
@click.option(
    "--handler",
    "handlers",
    multiple=True,
    metavar="NAME",
    help="With --containerd: runtime handler that gets the hooks; repeatable.  [default: Kata's]",
)
@click.option("--prestart", is_flag=True, help="Also use the prestart hook (Kata 1.x).")
@click.option(
    "--python", default="/usr/bin/python3", show_default=True, help="Interpreter of the hook."
)
@click.option("--program", help="Path of kata-pin.  [default: this program]")
@global_options
@click.pass_obj
def install(
    session: Session,
    *,
    root: str,
    crio: bool,
    podman: bool,
    containerd: bool,
    handlers: tuple[str, ...],
    prestart: bool,
    python: str,
    program: str | None,
) -> None:
    """Install the hook, the service and sample settings on this node.

    Also the man page, the description of the JSON documents, completions for bash, zsh and fish,
    and a link /usr/bin/kata-pin. Can be repeated: writes missing and outdated files and keeps
    modified ones. With --containerd also base runtime specs, each a copy of the handler's current
    one with the hooks added, and a drop-in that names them; containerd is not restarted.
    """
    chosen = {Runtime.CRIO: crio, Runtime.PODMAN: podman, Runtime.CONTAINERD: containerd}
    config_file = settings_file(root, session.config_file)
    choices = Choices(
        program=program_file(program),
        python=python,
        runtimes=frozenset(runtime for runtime, wanted in chosen.items() if wanted),
        prestart=prestart,
        config_file=config_file,
        config=settings_below(root, config_file),
        old_kernel=root != "/" or is_before(os.uname().release, (6, 6)),
    )
    node, files = NodeFiles(root), node_files(choices)
    run = containerd_files.run_program
    plan, steps = None, list[str]()
    if root == "/":
        check_programs(choices)
    with node.locked(), screen.progress("installing"):
        if root == "/" and containerd and shutil.which("containerd"):
            plan = containerd_files.plan(containerd_hooks(choices), handlers, run)
        if plan is None:
            changes = node.install(files, serves_containerd if containerd else lambda _: False)
        else:
            changes, steps = install_plan(node, files, plan, run)
    remarks = []
    if not choices.runtimes:
        remarks.append(NO_HOOKS)
    if root == "/":
        remarks.append(NEXT_STEPS)
    remarks += steps
    if containerd and plan is None:
        asked = root == "/" and shutil.which("containerd")
        remarks.append(NO_KATA if asked else BY_HAND)
    report(session, "install", changes, remarks)


@click.command()
@click.option(
    "--root", default="/", metavar="DIR", help="Remove files below DIR; affinities are kept."
)
@global_options
@click.pass_obj
def uninstall(session: Session, *, root: str) -> None:
    """Restore all affinities and remove the files of install that were not modified.

    Beside a package, whose files install left alone, the service and its affinities stay; beside
    the daemon of a pod, affinities stay.
    """
    node = NodeFiles(root)
    others_service = node.has_others_service

    def release() -> str:
        if root != "/":
            return "affinities are kept (--root)"
        if others_service:
            return f"affinities are kept: {UNIT} is not from kata-pin install"
        from kata_pin.records.hooks import Spool
        from kata_pin.service.offline import release_all
        from kata_pin.service.runtime_dir import holder

        config = settings_below(root, settings_file(root, session.config_file))
        if pod := holder(config.runtime_dir).pod:
            return f"affinities are kept: the daemon of pod {pod} serves this node"
        released = release_pins(config, release_all)
        Spool(os.path.join(config.runtime_dir, "spool")).retire()
        return (
            f"{released}\nleft: user and group {config.user} (userdel {config.user}), and until the"
            f" next boot {config.runtime_dir} with the registry"
        )

    with node.locked(), screen.progress("restoring affinities, removing files"):
        changes, released = uninstall_node(root, release)
    remarks = [released]
    if root == "/":
        remarks += last_steps(changes, program_file(None))
    report(session, "uninstall", changes, remarks)


def report(
    session: Session,
    kind: Literal["install", "uninstall", "kata-class"],
    changes: list[FileChange],
    remarks: list[str],
) -> None:
    """Print the change of each file, and the remaining steps."""
    if session.json:
        screen.document(FilesDocument(kind=kind, changes=tuple(changes), remarks=tuple(remarks)))
        return
    for text in (*map(line, changes), *remarks):
        click.echo(text)


AGAIN_S: Final = 1.0
"""Wait between two attempts to ask a daemon that only starts."""


@click.command()
@click.option(
    "--wait",
    "wait_s",
    metavar="SPAN",
    callback=time_span,
    default="30s",
    show_default=True,
    help="Longest wait for a daemon that is still starting.",
)
@global_options
@click.pass_obj
def release(session: Session, wait_s: int) -> None:
    """Have the daemon restore all affinities, and set none until it is restarted.

    What `uninstall` does on a node, without removing a file: for pods, whose files go with the
    image. Needs root. Unlike `unpin` it is not remembered.
    """

    def nobody(_config: object) -> Applied:
        raise DaemonAway("no daemon is running", hint="without one: kata-pin unpin")

    remark, deadline = "", time.monotonic() + wait_s
    with screen.progress("restoring affinities"):
        while not remark:
            try:
                remark = release_pins(session.config, nobody)
            except (DaemonAway, DaemonSilent):
                if time.monotonic() + AGAIN_S > deadline:
                    raise
                time.sleep(AGAIN_S)
    click.echo(remark)
