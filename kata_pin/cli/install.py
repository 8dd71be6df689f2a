"""`kata-pin install` and `kata-pin uninstall`.

Install writes the hook, its hooks.d files, the service and sample settings. Uninstall first keeps
new containers from running the hook, then has every pin given back (DESIGN D18), then takes the
rest away. With --root, for packagers, nothing outside it is read, written or asked.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable

import click

from kata_pin.cli.client import WRITE_S, DaemonAway, ask
from kata_pin.cli.nodechange import Change, Node
from kata_pin.cli.nodefiles import HOOKS_DIR, Choices, Runtime, node_files
from kata_pin.config import DEFAULT_FILE, Config, load
from kata_pin.errors import KataPinError

NEXT_STEPS = """\
next:
  systemd-sysusers && systemd-tmpfiles --create kata-pin.conf
  systemctl daemon-reload && systemctl enable --now kata-pin"""

CONTAINERD_STEP = """\
  containerd: merge /etc/kata-pin/containerd-hooks.json into the base runtime spec of Kata's
  handlers, as kata-pin(8) shows, and restart containerd"""

Release = Callable[[Config], object]
"""Gives back every pin when no daemon runs."""


def release_pins(config: Config, release_all: Release) -> str:
    """Have every pin given back, by the daemon or, without one, by `release_all`.

    Returns who did it. Raises KataPinError: a daemon that is there and does not answer included,
    for two writers must not race.
    """
    try:
        ask(os.path.join(config.runtime_dir, "control.sock"), "release", {}, WRITE_S)
    except DaemonAway:
        release_all(config)
        return "released every pin (no daemon runs)"
    return "released every pin (by the daemon)"


def uninstall_node(root: str, release: Callable[[], str]) -> tuple[list[Change], str]:
    """Take kata-pin off the node below `root`; `release` gives the pins back meanwhile.

    In this order: no new container runs the hook, the pins are given back, all else goes. Should
    the release fail, the service and its settings are still there to try again.
    """
    node = Node(root)
    changes = node.uninstall(folder=HOOKS_DIR)
    released = release()
    return changes + node.uninstall(), released


def check_programs(choices: Choices) -> None:
    """Raise KataPinError unless the programs that the files will name can be run here."""
    for option, path in (("--python", choices.python), ("--program", choices.program)):
        if not os.access(path, os.X_OK):
            raise KataPinError(f"{path} is not a program", hint=f"say where it is with {option}")


def settings_below(root: str, config_file: str) -> Config:
    """Return the settings of the node below `root`; the defaults when it has none yet."""
    return load(default=os.path.join(root, config_file.lstrip("/")))


@click.command()
@click.option("--root", default="/", metavar="DIR", help="Install below DIR, for packages.")
@click.option("--crio", is_flag=True, help="Hooks for every container of CRI-O.")
@click.option("--podman", is_flag=True, help="Hooks by annotation for podman.")
@click.option("--containerd", is_flag=True, help="Hooks for a base runtime spec of containerd.")
@click.option("--prestart", is_flag=True, help="Hook prestart too, for Kata 1.x.")
@click.option("--python", default="/usr/bin/python3", show_default=True, help="For the hook.")
@click.option("--program", help="Where kata-pin is.  [default: this one]")
@click.option("--config", "config_file", default=DEFAULT_FILE, show_default=True, help="Settings.")
def install(
    *,
    root: str,
    crio: bool,
    podman: bool,
    containerd: bool,
    prestart: bool,
    python: str,
    program: str | None,
    config_file: str,
) -> None:
    """Put hook, service and sample settings on this node.

    May be repeated: it writes what is missing or of another version and keeps what you changed.
    """
    chosen = {Runtime.CRIO: crio, Runtime.PODMAN: podman, Runtime.CONTAINERD: containerd}
    choices = Choices(
        program=program or os.path.join(sysconfig.get_path("scripts"), "kata-pin"),
        python=python,
        runtimes=frozenset(runtime for runtime, wanted in chosen.items() if wanted),
        prestart=prestart,
        config_file=config_file,
        config=settings_below(root, config_file),
    )
    if root == "/":
        check_programs(choices)
    for change in Node(root).install(node_files(choices)):
        click.echo(str(change))
    if not choices.runtimes:
        click.echo("no hooks: choose --crio, --podman or --containerd")
    if root == "/":
        click.echo(NEXT_STEPS)
    if containerd:
        click.echo(CONTAINERD_STEP)


@click.command()
@click.option("--root", default="/", metavar="DIR", help="Remove below DIR only; keeps the pins.")
@click.option("--config", "config_file", default=DEFAULT_FILE, show_default=True, help="Settings.")
def uninstall(root: str, config_file: str) -> None:
    """Give every pin back and remove what install wrote and nobody changed."""

    def release() -> str:
        if root != "/":
            return "pins are left as they are (--root)"
        from kata_pin.daemon import release_all

        return release_pins(settings_below(root, config_file), release_all)

    changes, released = uninstall_node(root, release)
    for change in changes:
        click.echo(str(change))
    click.echo(released)
    if root == "/":
        click.echo("next: systemctl disable --now kata-pin; systemctl daemon-reload")
