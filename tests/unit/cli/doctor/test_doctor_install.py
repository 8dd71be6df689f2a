"""`doctor` after `install`: each step that was forgotten is one row to fix."""

import grp
import os
from pathlib import Path

import pytest

from kata_pin.base.config.tree import Config
from kata_pin.base.documents.state import DoctorDocument, Row
from kata_pin.cli.doctor.install import hooks, installation
from kata_pin.cli.node.changes import NodeFiles
from kata_pin.cli.node.files import HOOK_PATH, Choices, Runtime, node_files
from kata_pin.cli.render.layout import Output
from kata_pin.cli.render.reports import doctor as render
from tests.unit.cli import documents as docs
from tests.unit.conftest import Doctor

ABSENT = Config(group="no-such-group", runtime_dir="/run/no-such-directory")
OURS = grp.getgrgid(os.getgid()).gr_name
CHOICES = Choices(program="/opt/kata-pin/bin/kata-pin", runtimes=frozenset({Runtime.CONTAINERD}))


def _rows(node: NodeFiles, config: Config) -> dict[str, Row]:
    return {row.check: row for row in installation(config, node)}


@pytest.fixture
def node(tmp_path: Path) -> NodeFiles:
    """Return a node on which kata-pin is installed."""
    made = NodeFiles(str(tmp_path))
    made.install(node_files(CHOICES))
    return made


def test_a_node_where_every_step_was_done_has_nothing_to_fix(
    node: NodeFiles, tmp_path: Path
) -> None:
    """Files, group and directory are there: the summary says so in those words."""
    rows = tuple(installation(Config(user="root", group=OURS, runtime_dir=str(tmp_path)), node))
    assert [row.status for row in rows] == ["ok"] * 4
    lines = render(DoctorDocument(ok=True, rows=rows), Output(120))
    assert lines[-1].plain == "0 to fix, 0 to check, 4 ok"


def test_steps_that_were_forgotten_have_their_command(node: NodeFiles) -> None:
    """Without sysusers the service does not start, without tmpfiles hooks cannot spool."""
    rows = _rows(node, ABSENT)
    assert (rows["group"].status, rows["group"].remedy) == ("fail", "systemd-sysusers")
    assert (rows["user"].status, "nobody" in rows["user"].text) == ("warn", True)
    directory = rows["runtime directory"]
    assert directory.status == "fail"
    assert directory.remedy == "systemd-tmpfiles --create kata-pin.conf"


def test_a_file_that_is_gone_or_changed_is_named(node: NodeFiles, tmp_path: Path) -> None:
    """A missing one is to fix; a modified one is the administrator's."""
    (tmp_path / "etc/kata-pin/config.yaml").write_text("version: 1\n")
    row = _rows(node, ABSENT)["installation"]
    assert (row.status, "config.yaml" in row.text) == ("info", True)
    (tmp_path / HOOK_PATH[1:]).unlink()
    row = _rows(node, ABSENT)["installation"]
    assert (row.status, HOOK_PATH in row.text) == ("fail", True)


def test_a_node_without_install_has_one_row(tmp_path: Path) -> None:
    """Who runs kata-pin from a clone is not told to create groups."""
    (row,) = installation(ABSENT, NodeFiles(str(tmp_path)))
    assert row.status == "info"


def test_hooks_are_found_by_name(tmp_path: Path) -> None:
    """A file that names the hook counts; the hook has to be there to be run."""
    pattern = (f"{tmp_path}/*.json",)
    program = tmp_path / "kata-pin-hook"
    assert hooks(pattern, str(program)).status == "warn"
    assert hooks(pattern, str(program), by_nri=True).status == "ok", "NRI needs none"
    (tmp_path / "other.json").write_text("{}")
    assert hooks(pattern, str(program)).status == "warn"
    (tmp_path / "90-kata-pin.json").write_text('{"hook": {"path": "/x/kata-pin-hook"}}')
    assert hooks(pattern, str(program)).status == "fail"
    program.write_text("#!/bin/true\n")
    program.chmod(0o755)
    row = hooks(pattern, str(program))
    assert (row.status, row.text) == ("ok", f"installed: {tmp_path}/90-kata-pin.json")


def test_a_service_wants_its_daemon(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed nobody is satisfied with the command line alone."""
    monkeypatch.setattr(NodeFiles, "has_service", True)
    doctor.state = docs.without_daemon(docs.state())
    assert doctor.row("daemon").status == "fail"


def test_the_step_that_is_left_with_containerd_is_named(tmp_path: Path) -> None:
    """The fragment is installed, no base runtime spec has it yet: that is the remedy."""
    fragment = tmp_path / "containerd-hooks.json"
    pattern = str(tmp_path / "none-*.json")
    assert "install" in hooks((pattern,), "/bin/true", str(fragment)).remedy
    fragment.touch()
    row = hooks((pattern,), "/bin/true", str(fragment))
    assert row.status == "warn"
    assert row.remedy.startswith("kata-pin install --containerd")


def test_a_spec_that_containerd_does_not_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does nothing until its line is in the configuration, which may be unreadable."""
    config, specs = tmp_path / "config.toml", f"{tmp_path}/"
    monkeypatch.setattr("kata_pin.cli.node.containerd.CONFIG", str(config))
    spec = tmp_path / "kata.json"
    spec.write_text('{"hooks": {"poststop": [{"path": "/x/kata-pin-hook"}]}}')

    def row() -> Row:
        return hooks((str(spec),), "/bin/true", "/nowhere", specs)

    config.write_text(f'# base_runtime_spec = "{spec}"')
    assert (row().status, "which line is missing" in row().remedy) == ("warn", True)
    for text in (f'base_runtime_spec = "{spec}"', "= broken"):
        config.write_text(text)
        assert row().status == "ok"
