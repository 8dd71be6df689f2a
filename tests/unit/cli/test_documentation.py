"""docs/json.md and docs/kata-pin.8 agree with what the program does."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from kata_pin.cli.commands.map import map_document
from kata_pin.cli.commands.pools import pools_document
from kata_pin.cli.main import COMMANDS, cli
from kata_pin.cli.node.manual import page
from kata_pin.cli.reports import shape
from kata_pin.cli.reports import who as who_report
from kata_pin.cli.reports.findings import check
from kata_pin.config import Config
from kata_pin.config.table import SETTINGS
from kata_pin.daemon.service import offline
from kata_pin.host.root import HOST
from tests.unit.cli import documents as docs
from tests.unit.cli.cases import CHECKED

DOCS = Path(__file__).parents[3] / "docs"
ONLY_RUNNING = {"pid", "version", "uptime_s", "nri", "metrics"}


def documented() -> dict[str, set[str]]:
    """Return the fields of each object path that docs/json.md has a table for."""
    tables: dict[str, set[str]] = {}
    paths: list[str] = []
    for line in (DOCS / "json.md").read_text().splitlines():
        if line.startswith("#"):
            paths = re.findall(r"`([^`]+)`", line)
        elif found := re.match(r"\| `([a-z_]+)` \|", line):
            for path in paths:
                tables.setdefault(path, set()).add(found[1])
    return tables


def occurring(value: Any, path: str) -> dict[str, set[str]]:
    """Return the fields of each object in a document, by the path that docs/json.md uses."""
    found: dict[str, set[str]] = {}
    if isinstance(value, dict):
        found[path] = set(value)
        for key, inner in value.items():
            for deeper, fields in occurring(inner, f"{path}.{key}").items():
                found.setdefault(deeper, set()).update(fields)
    elif isinstance(value, list):
        for item in value:
            for deeper, fields in occurring(item, f"{path}[]").items():
                found.setdefault(deeper, set()).update(fields)
    return found


TABLES = documented()


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (docs.state(docs.database(), docs.drifted()), "state"),
        (map_document(docs.state(docs.database(), docs.drifted(), docs.lost())), "map"),
        (docs.allotted(), "state"),
        (pools_document(docs.allotted()), "pools"),
        (docs.busy_cpu(), "who"),
        (who_report.who(HOST, docs.state(cpus=8192), min(os.sched_getaffinity(0))), "who"),
        (docs.explained(), "explain"),
        (docs.changed(), "history"),
        (CHECKED, "check"),
        (check(docs.state(), [], intruders_fail=True), "check"),
        (docs.examined(), "doctor"),
        (docs.done(), "pin"),
    ],
)
def test_documents_have_the_documented_fields(document: Any, kind: str) -> None:
    """Every object in a document has exactly the fields of its table."""
    for path, fields in occurring(document, kind).items():
        before, daemon, after = path.partition(".daemon")
        expected = TABLES[f"state.daemon{after}" if daemon else before]
        if path.endswith(".daemon"):
            expected = expected - ({"reason"} if document["daemon"]["running"] else ONLY_RUNNING)
        assert fields == expected, path


def test_the_state_of_this_host_has_the_documented_fields(tmp_path: Path) -> None:
    """What the daemon's own code makes has the same fields as the hand-made documents."""
    document = offline.state(Config(runtime_dir=str(tmp_path)))
    for path, fields in occurring(document, "state").items():
        expected = TABLES[path] - (ONLY_RUNNING if path == "state.daemon" else set())
        assert fields == expected, path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("state", shape.State),
        ("state.daemon", shape.Daemon),
        ("state.daemon.nri", shape.Nri),
        ("state.daemon.metrics", shape.Metrics),
        ("state.node", shape.Node),
        ("state.node.cpus[]", shape.CpuPlace),
        ("state.node.kubelet", shape.Kubelet),
        ("state.sandboxes[]", shape.Sandbox),
        ("state.sandboxes[].containers[]", shape.Container),
        ("state.sandboxes[].vmm", shape.Vmm),
        ("state.sandboxes[].guest", shape.Guest),
        ("state.sandboxes[].guest.vcpus[]", shape.GuestVcpu),
        ("state.sandboxes[].guest.vcpus[].links", shape.GuestLinks),
        ("state.sandboxes[].guest.vcpus[].links.vcpu", shape.Known),
        ("state.sandboxes[].guest.containers[]", shape.GuestContainer),
        ("state.sandboxes[].threads[]", shape.Thread),
        ("state.sandboxes[].writers[]", shape.Writer),
        ("state.allocation", shape.Allocation),
        ("state.allocation.pools", shape.Pools),
        ("state.allocation.grants[]", shape.Grant),
        ("state.allocation.push", shape.Push),
        ("state.allocation.push.failures[]", shape.PushFailure),
        ("state.allocation.refused[]", shape.Refused),
        ("state.notes[]", shape.Note),
    ],
)
def test_types_have_the_documented_fields(path: str, kind: type) -> None:
    """The types that the renderers are checked against are those of docs/json.md."""
    assert set(get_type_hints(kind)) == TABLES[path]


def test_the_man_page_is_the_generated_one() -> None:
    """scripts/man was run after the last change of a command or a setting."""
    assert (DOCS / "kata-pin.8").read_text() == page()


def test_the_man_page_has_every_setting_command_and_option() -> None:
    """Nothing that can be set or typed is missing."""
    text = page().replace("\\-", "-").replace("\\&", "")
    for entry in SETTINGS:
        assert f"\n.TP\n\\fB{entry.key}\\fR\n" in text
        assert f"Default: {entry.default_text}." in text
    for name in COMMANDS:
        assert f"\n.SS kata-pin {name}" in text
    assert all(option in text for option in ("--config FILE", "--json", "--debug", "--cpus"))


def test_the_man_page_formats_without_warnings(tmp_path: Path) -> None:
    """man(7) macros are used as they are meant."""
    groff = Path("/usr/bin/groff")
    if not groff.exists():
        pytest.skip("groff is not installed")
    done = subprocess.run(
        [groff, "-man", "-Kutf8", "-Tutf8", "-ww", "-z", DOCS / "kata-pin.8"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=30,
        check=True,
    )
    assert done.stderr == ""


def test_every_option_has_help() -> None:
    """No option or command is without a word of help."""
    import click

    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        assert command.help
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.name}"
