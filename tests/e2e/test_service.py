"""The project as its own `kata-pin install` left it: a service that runs and answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.node import Node
from tests.e2e.unit import CONFIG, Unit


@pytest.fixture(scope="module")
def state(node: Node) -> Any:
    """What `kata-pin show --json` prints; asked once, because a start of Python costs seconds."""
    return json.loads(node.run(["kata-pin", "show", "--json"], seconds=12))


def test_install_succeeded(node: Node) -> None:
    """`kata-pin install` and the steps that it names all succeeded (else see install.txt)."""
    assert node.installed


def test_service_runs_and_notified(node: Node) -> None:
    """systemd took READY=1 from the service, as Type=notify demands, and has its status line."""
    shown = node.run(
        ["systemctl", "show", "kata-pin", "-p", "ActiveState,Type,StatusText,NRestarts"]
    )
    facts = dict(line.partition("=")[::2] for line in shown.splitlines())
    assert facts["Type"] == "notify"
    assert facts["ActiveState"] == "active"
    assert facts["NRestarts"] == "0"
    assert facts["StatusText"]


def test_the_service_starts_without_its_configuration_file(node: Node) -> None:
    """The defaults apply then; the unit names no file whose absence would be an error."""
    unit, aside = Unit(node), CONFIG.with_suffix(".aside")
    before = unit.pid
    CONFIG.rename(aside)
    try:
        unit.systemctl("restart")
        unit.wait_running(other_than=before)
    finally:
        aside.rename(CONFIG)
        unit.systemctl("restart")
        unit.wait_running()


def test_runtime_folder_is_for_root_and_the_group(node: Node) -> None:
    """The folder made by tmpfiles and the sockets in it have the promised modes."""
    folder = Path("/run/kata-pin")
    modes = {
        name: (folder / name).stat().st_mode & 0o777
        for name in ("", "spool", "hook.sock", "control.sock", "status.sock")
    }
    assert modes == {
        "": 0o750,
        "spool": 0o700,
        "hook.sock": 0o600,
        "control.sock": 0o600,
        "status.sock": 0o660,
    }
    assert folder.group() == "kata-pin"


def test_show_is_the_daemons_answer_for_this_machine(node: Node, state: Any) -> None:
    """The command line reaches the daemon, which sees all CPUs and no sandbox."""
    assert state["daemon"]["running"] is True
    assert state["node"]["online"] == f"0-{node.cpus - 1}"
    assert {cpu["node"] for cpu in state["node"]["cpus"]} == set(range(node.nodes))
    assert state["sandboxes"] == []
