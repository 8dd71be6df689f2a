"""`kata-pin kata-class`: a RuntimeClass whose VMs are as big as the CPUs that its pods buy."""

from __future__ import annotations

import difflib
import os
from typing import Final

import click

from kata_pin.base.documents.answers import FileChange
from kata_pin.base.errors import KataPinError, reason_of
from kata_pin.cli.commands.install import report
from kata_pin.cli.node import containerd
from kata_pin.cli.node.changes import NodeFiles
from kata_pin.cli.node.files import NodeFile, serves_class
from kata_pin.cli.node.kata_class import KataClass, plan
from kata_pin.cli.options import global_options
from kata_pin.cli.session import Session

MAX_CPUS: Final = 240
"""The most vCPUs that Kata gives a VM on x86, less the guest's own."""


@click.command("kata-class")
@click.option(
    "--cpus",
    type=click.IntRange(1, MAX_CPUS),
    multiple=True,
    metavar="N",
    help="Exclusive CPUs that each pod of the class has; one class for each --cpus.",
)
@click.option("--handler", default="", metavar="NAME",
              help="Handler of Kata to make it from.  [default: the only one]")  # fmt: skip
@click.option("--write", is_flag=True, help="Write the node's files, after the difference.")
@click.option(
    "--remove", is_flag=True, help="Remove the files of this class; without --cpus, of all."
)
@click.option("--chroot", "root", default="", metavar="DIR",
              help="Work in the node's file system at DIR, as the chart's pods do.")  # fmt: skip
@global_options
@click.pass_obj
def kata_class(
    session: Session, *, cpus: tuple[int, ...], handler: str, write: bool, remove: bool, root: str
) -> None:
    """Print a RuntimeClass for pods with N exclusive CPUs, and the node's files that it needs.

    With runtime-rs and the kubelet's static policy a VM has one vCPU for any number of exclusive
    CPUs. VMs of this class have N + 1: a handler of containerd with a copy of the base handler's
    configuration, and a drop-in with overhead_vcpus. Shows what would change; --write writes it,
    uninstall removes it. Kata's own files are not changed, containerd is not restarted. Run it
    again after an update of Kata: the copy stays as it was.
    """
    if not cpus and not remove:
        raise click.UsageError("Missing option '--cpus'.")
    if root:
        os.chroot(root)
        os.chdir("/")
    node, run = NodeFiles(), containerd.run_program
    changes: list[FileChange] = []
    remarks: list[str] = []
    with node.locked():
        if remove and not cpus:
            changes = node.uninstall(serves_class)
        try:
            for made in (plan(size, handler, run) for size in cpus):
                done = _apply(session, node, made, write=write, remove=remove)
                changes += done
                remarks += [] if remove else _remarks(made, done, write=write)
        except KataPinError as error:
            if not root:
                raise
            remarks.append(f"no class on this node: {error}")  # its daemon starts all the same
    if remove and not changes:
        remarks.append("nothing to remove: no such file is of kata-pin kata-class")
    report(session, "kata-class", changes, list(dict.fromkeys(remarks)))


def _apply(
    session: Session, node: NodeFiles, made: KataClass, *, write: bool, remove: bool
) -> list[FileChange]:
    """Show a class's difference, write or remove its files, and return the changes."""
    if remove:
        return node.uninstall({file.path for file in made.files}.__contains__)
    difference = [text for file in made.files for text in _difference(file, made)]
    changes = (
        node.add(made.files)
        if write
        else [change for change in node.preview(made.files) if change.verb != "unchanged"]
    )
    if not session.json:
        click.echo("".join(difference), nl=False)
    return changes


def _difference(file: NodeFile, made: KataClass) -> list[str]:
    """Return the lines that a file changes; of a new copy of Kata's file only that it is one."""
    try:
        with open(file.path, encoding="utf-8", errors="replace") as opened:
            now = opened.read().splitlines(keepends=True)
    except FileNotFoundError:
        if file.path == made.files[0].path:
            return [f"+++ {file.path}: a copy of {made.base_config}\n"]
        now = []
    except OSError as error:
        return [f"cannot read {file.path}: {reason_of(error)}\n"]
    then = file.content.decode("utf-8", "replace").splitlines(keepends=True)
    return list(difflib.unified_diff(now, then, file.path if now else "/dev/null", file.path))


def _remarks(made: KataClass, changes: list[FileChange], *, write: bool) -> list[str]:
    steps = []
    if not write and changes:
        steps.append("nothing was written; run it again with --write")
    if made.table:
        steps.append(
            f"containerd: a drop-in would change other settings. Add this to {containerd.CONFIG}:\n"
            + made.table.partition("\n\n")[2].rstrip("\n")
        )
    if changes or made.table:
        steps.append(f"then restart containerd:\n  {containerd.RESTART}")
    return [*steps, f"the RuntimeClass, for kubectl apply -f -:\n{made.runtime_class}".rstrip("\n")]
