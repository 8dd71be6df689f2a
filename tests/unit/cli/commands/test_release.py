"""What `uninstall` and `release` give back: in which order, by whom, and what they say of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config
from kata_pin.base.documents.answers import Applied, AppliedSandbox
from kata_pin.base.documents.document import Note
from kata_pin.base.documents.pools import KeptCpuset
from kata_pin.base.errors import DaemonError, StateError
from kata_pin.base.json_text import Fields
from kata_pin.base.values import NoteLevel
from kata_pin.cli.commands.install import kept_cpusets, release_pins, uninstall_node
from kata_pin.cli.node.changes import MANIFEST
from kata_pin.cli.node.files import HOOK_PATH, HOOKS_DIR, UNIT
from kata_pin.service.commands import ControlServer
from kata_pin.service.configuration import from_text
from kata_pin.service.protocol import encode
from tests.support.commandline import run
from tests.support.hooks import runtime_directory

NOTHING = Applied(kind="unpin", sandboxes=())


def files(root: Path) -> set[str]:
    """Return the path of every file below a folder."""
    return {f"/{path.relative_to(root)}" for path in root.rglob("*") if not path.is_dir()}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a root below which everything is installed."""
    assert run(["install", "--root", str(tmp_path), "--crio", "--podman", "--containerd"]) == 0
    return tmp_path


def test_uninstall_order(installed: Path) -> None:
    """The pins are given back when no new container runs the hook, and before the rest goes."""
    seen = []

    def release() -> str:
        seen.append(files(installed))
        return "released"

    uninstall_node(str(installed), release)
    [during] = seen
    assert not [path for path in during if path.startswith(HOOKS_DIR)]
    assert {HOOK_PATH, UNIT, "/etc/kata-pin/config.yaml", MANIFEST} < during


def test_failing_release_keeps_the_service(installed: Path) -> None:
    """When the pins can not be given back, what is needed to try again stays."""

    def fail() -> str:
        raise DaemonError("the daemon did not answer")

    with pytest.raises(DaemonError):
        uninstall_node(str(installed), fail)
    assert {HOOK_PATH, UNIT, MANIFEST} < files(installed)
    uninstall_node(str(installed), lambda: "released")
    assert files(installed) == set()


def test_release_without_a_daemon(tmp_path: Path) -> None:
    """Without a daemon the function that is given releases, with the node's settings."""
    config = from_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    released: list[Config] = []

    def release_all(chosen: Config) -> Applied:
        released.append(chosen)
        return replace(NOTHING, cpusets_kept=(KeptCpuset("c", "shop/db", "app", "2-3"),))

    said = release_pins(config, release_all)
    assert "no daemon" in said
    assert said.splitlines()[1:] == [
        "these containers keep the CPUs that kata-pin gave them until their pods are recreated:",
        "  shop/db app 2-3",
    ]
    assert released == [config]


def test_what_a_release_leaves_is_named(tmp_path: Path) -> None:
    """Not all was restored: which threads of which pod keep what, and why; no word of all."""
    note = Note("kept-narrow", "5 threads keep 6-7: kata-pin did not set it", NoteLevel.WARNING)
    pods = AppliedSandbox("id", "shop/web", "released", "", 9, 1.0, (), (note,))
    config = from_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    said = release_pins(config, lambda _: replace(NOTHING, sandboxes=(pods,)))
    assert said.splitlines() == [
        "restored affinities (no daemon is running), except:",
        "  shop/web: 5 threads keep 6-7: kata-pin did not set it",
    ]


def test_a_release_with_a_failed_option_is_none(tmp_path: Path) -> None:
    """So `uninstall` keeps the service and its settings for another attempt."""
    config = from_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    failed = replace(NOTHING, options_failed=("option siren: it is broken",))
    with pytest.raises(StateError, match="option siren: it is broken"):
        release_pins(config, lambda _: failed)


def test_names_of_containers_are_printed_safely() -> None:
    """A runtime passes on any name: none may move the cursor or make a line of its own."""
    kept = (KeptCpuset("c", "shop/\x1b[2Jdb", "a\nb", "2-3"),)
    assert kept_cpusets(replace(NOTHING, cpusets_kept=kept))[1:] == [r"  shop/\x1b[2Jdb a\x0ab 2-3"]


async def test_release_by_the_daemon(tmp_path: Path) -> None:
    """With a daemon it is the daemon that releases, and nobody else."""
    asked: list[str] = []
    by_ourselves: list[Config] = []

    def release_all(chosen: Config) -> Applied:
        by_ourselves.append(chosen)
        return NOTHING

    async def release(_: Fields) -> bytes:
        asked.append("release")
        return encode(NOTHING)

    async def ping(_: Fields) -> bytes:
        return b"{}"

    with runtime_directory() as directory:
        verbs = {"release": release, "ping": ping}
        server = ControlServer(str(directory / "control.sock"), verbs)
        config = from_text(f"version: 1\nruntime_dir: {directory}\n")
        async with server.serving():
            said = await asyncio.to_thread(release_pins, config, release_all)
    assert said == "restored all affinities (by the daemon)"
    assert (asked, by_ourselves) == (["release"], [])
