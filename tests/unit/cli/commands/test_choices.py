"""What `kata-pin install` makes of its options and of this machine; `uninstall`, in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin import hook
from kata_pin.base.config.tree import Config, Hook
from kata_pin.base.documents.answers import Applied
from kata_pin.base.errors import DaemonError, KataPinError
from kata_pin.cli.commands.install import (
    is_before,
    program_file,
    release_pins,
    settings_file,
    uninstall_node,
)
from kata_pin.cli.node.changes import MANIFEST
from kata_pin.cli.node.files import HOOK_PATH, HOOKS_DIR, UNIT, Choices, NodeFile, node_files
from kata_pin.service.configuration import DEFAULT_FILE, from_text
from tests.support.commandline import run

PROGRAM = "/opt/kata-pin/bin/kata-pin"
CHOICES = Choices(program=PROGRAM)


def contents(choices: Choices) -> dict[str, bytes]:
    """Return what is installed but for the link, by path."""
    return {file.path: file.content for file in node_files(choices) if isinstance(file, NodeFile)}


def test_defaults_are_the_hooks() -> None:
    """The configuration's defaults are those that the hook has without arguments."""
    options = hook.Arguments(["poststop"])
    assert options.runtime_dir == Config().runtime_dir
    assert options.record_s * 1000 == Hook().record_ms
    assert options.pin_s * 1000 == Hook().pin_ms


@pytest.mark.parametrize(
    ("release", "old"),
    [("6.1.0-37-amd64", True), ("6.5.13", True), ("6.6.0", False), ("6.18.44", False), ("x", True)],
)
def test_an_old_kernel_takes_one_right_more(release: str, old: bool) -> None:
    """The process connector before Linux 6.6: only there the service has CAP_NET_ADMIN."""
    assert is_before(release, (6, 6)) is old
    path = "/usr/lib/systemd/system/kata-pin.service.d/before-linux-6.6.conf"
    found = contents(replace(CHOICES, old_kernel=old))
    assert (path in found) is old
    if old:
        assert b"AmbientCapabilities=CAP_NET_ADMIN\n" in found[path]


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--config", {"config_file": "settings.yaml"}),
        ("--config", {"config_file": "/etc/my settings.yaml"}),
        ("--config", {"config_file": "/etc/%n.yaml"}),
        ("--program", {"program": "kata-pin"}),
    ],
)
def test_what_the_service_cannot_start_is_refused(option: str, changes: dict[str, str]) -> None:
    """systemd would look for it elsewhere, or read it otherwise."""
    with pytest.raises(KataPinError, match=f"the service cannot start .* \\(give {option} an abs"):
        node_files(replace(CHOICES, **changes))


def test_a_relative_configuration_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service's folder is not the one that install runs in."""
    monkeypatch.chdir(tmp_path)
    assert settings_file("/", "settings.yaml") == f"{tmp_path}/settings.yaml"
    assert settings_file("/", "/etc/x.yaml") == "/etc/x.yaml"
    assert settings_file("/", None) == settings_file("/dest", None) == DEFAULT_FILE
    with pytest.raises(KataPinError, match="is not an absolute path"):
        settings_file("/dest", "settings.yaml")


def test_sample_settings_are_the_defaults() -> None:
    """The installed settings file can be read and changes nothing."""
    assert from_text(contents(CHOICES)[DEFAULT_FILE].decode()) == Config()


def test_the_link_of_an_earlier_install_means_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the link would be removed as no longer wanted, and the unit would name it."""
    link = tmp_path / "kata-pin"
    link.symlink_to(PROGRAM)
    monkeypatch.setattr("kata_pin.cli.commands.install.PROGRAM_LINK", str(link))
    assert program_file(str(link)) == PROGRAM
    assert program_file("/usr/local/bin/kata-pin") == "/usr/local/bin/kata-pin"
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "absent"))
    assert program_file(None) == PROGRAM, "a package's program is in no folder of Python's"


# ---- uninstall -------------------------------------------------------------------------------


def files(root: Path) -> set[str]:
    """Return the path of every file below a folder."""
    return {f"/{path.relative_to(root)}" for path in root.rglob("*") if not path.is_dir()}


def test_uninstall_order(tmp_path: Path) -> None:
    """The pins are given back when no new container runs the hook, and before the rest goes.

    When they can not be, what is needed to try again stays.
    """
    assert run(["install", "--root", str(tmp_path), "--crio", "--podman", "--containerd"]) == 0
    needed = {HOOK_PATH, UNIT, DEFAULT_FILE, MANIFEST}

    def fail() -> str:
        assert not [path for path in files(tmp_path) if path.startswith(HOOKS_DIR)]
        assert needed < files(tmp_path)
        raise DaemonError("the daemon did not answer")

    with pytest.raises(DaemonError):
        uninstall_node(str(tmp_path), fail)
    assert needed < files(tmp_path)
    uninstall_node(str(tmp_path), lambda: "released")
    assert files(tmp_path) == set()


def test_uninstall_without_a_daemon(tmp_path: Path) -> None:
    """The function that is given releases, with the node's settings."""
    config = from_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    released: list[Config] = []

    def release_all(chosen: Config) -> Applied:
        released.append(chosen)
        return Applied(kind="unpin", sandboxes=())

    assert "no daemon" in release_pins(config, release_all)
    assert released == [config]
