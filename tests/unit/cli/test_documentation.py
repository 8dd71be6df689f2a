"""docs/json.md and docs/kata-pin.8 agree with what the program does."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from kata_pin.base.config.table import SETTINGS
from kata_pin.base.config.tree import Config
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.state import State
from kata_pin.cli.commands.inspect import map_document
from kata_pin.cli.main import cli
from kata_pin.cli.quick import COMMANDS, HELP
from kata_pin.cli.reports import who as who_report
from kata_pin.cli.reports.findings import check
from kata_pin.options.allocation.command import pools_document
from kata_pin.service import offline
from kata_pin.service.protocol import decode, encode
from tests.support.json_schema import violations
from tests.support.man_page import own_help, page
from tests.support.report_docs import DOCUMENTS, fields_of, generated
from tests.unit.cli import documents as docs
from tests.unit.cli.cases import CHECKED
from tests.unit.cli.compared import DECIDED, SUPPOSED
from tests.unit.cli.supposed import FULL, POOLED, SERVED
from tests.unit.conftest import plain

DOCS = Path(__file__).parents[3] / "docs"


def wrong(document: object, kind: str) -> list[str]:
    """Return what of a document does not fit the schema file of its kind."""
    schema = json.loads((DOCS / "schema" / f"{kind}.json").read_text())
    return list(violations(plain(document), schema, schema))


@pytest.mark.parametrize("path", [*generated(), "schema"])
def test_generated_files_are_current(path: str) -> None:
    """scripts/schema was run after the last change of a report, and no file is left over."""
    if path == "schema":
        found = {f"schema/{one.name}" for one in (DOCS / path).iterdir()}
        assert found == set(generated()) - {"json.md", "metrics.md"}
    else:
        assert (DOCS / path).read_text() == generated()[path]


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (docs.state(docs.database(), docs.drifted()), "state"),
        (docs.networked(), "state"),
        (map_document(docs.state(docs.database(), docs.drifted(), docs.lost())), "map"),
        (docs.allotted(), "state"),
        (pools_document(docs.allotted()), "pools"),
        (docs.top(), "top"),
        (docs.remembered(), "memory"),
        (docs.busy_cpu(), "who"),
        (docs.busy_cpus(), "who"),
        (who_report.who(docs.state(cpus=8192), CpuSet([min(os.sched_getaffinity(0))])), "who"),
        (docs.explained(), "explain"),
        (docs.changed(), "history"),
        (CHECKED, "check"),
        (check(docs.state(), [], intruders_fail=True), "check"),
        (docs.examined(), "doctor"),
        (docs.done(), "pin"),
        (SERVED, "what-if"),
        (POOLED, "what-if"),
        (FULL, "what-if"),
        (DECIDED, "alloc-compare"),
        (SUPPOSED, "alloc-compare"),
    ],
)
def test_documents_fit_their_schema(document: object, kind: str) -> None:
    """The documents that the golden files are made from are valid ones."""
    assert wrong(document, kind) == []


def test_the_state_of_this_host_fits_its_schema(tmp_path: Path) -> None:
    """What is made without a daemon is valid, and decodes to the same."""
    state = offline.state(Config(runtime_dir=str(tmp_path)))
    assert wrong(state, "state") == []
    assert decode(encode(state), State) == state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "acting"}, "not one of"),
        ({"online": "0-"}, "does not match"),
        ({"cpus": None}, "is not array"),
        ({"extra": 1}, "unknown"),
    ],
)
def test_a_wrong_document_does_not_fit(change: dict[str, object], words: str) -> None:
    """The validator sees a wrong value, type, cpu list, and an unknown or missing field."""
    document = plain(docs.state())
    document["node"] |= change
    assert any(words in one for one in wrong(document, "state"))
    del document["node"]["mode"]
    assert any("missing" in one for one in wrong(document, "state"))


def test_every_field_is_described() -> None:
    """docs/json.md has no empty cell, and no part without a sentence."""
    empty = re.findall(r"\| `(\w+)` \| [^|]+ \|  \|", generated()["json.md"])
    assert empty == []
    parts = {part for cls in DOCUMENTS.values() for part in (cls, *fields_of(cls))}
    assert [part.__name__ for part in parts if not part.__doc__] == []


def test_the_man_page_is_the_generated_one() -> None:
    """scripts/man was run after the last change of a command or a setting."""
    assert (DOCS / "kata-pin.8").read_text() == page()


def test_the_help_of_the_program_has_each_commands_own_words() -> None:
    """scripts/man was run after the last change of a command's first line."""
    assert Path(HELP).read_text() == own_help() + "\n"


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
