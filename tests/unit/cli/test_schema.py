"""What each command prints with --json fits its published schema, whatever values it has."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.answers import Names, SandboxName
from kata_pin.base.documents.check import FindingRow, Findings
from kata_pin.base.documents.measured import WatchDocument
from kata_pin.base.values import CheckVerdict, Outcome
from kata_pin.cli.reports.findings import check
from tests.support.checkpoint import checkpoint
from tests.support.commandline import run
from tests.support.json_schema import violations
from tests.support.report_docs import DOCS, DOCUMENTS, comments, dropped, fields_of
from tests.unit.cli import documents as docs
from tests.unit.conftest import Serve, plain

STATE = docs.state(docs.database(), docs.drifted(), docs.lost())
WATCH = WatchDocument(time="", max_foreign_percent=0.1, problem="", pcpus=())

COMMANDS = {
    "show": "state",
    "show --memory": "memory",
    "draw": "state",
    "map": "map",
    "who 0": "who",
    "explain db-0": "explain",
    "history": "history",
    "check": "check",
    "prove --for 1s": "prove",
    "top --once --interval 0.5": "top",
    "doctor": "doctor",
    "pin": "pin",
    "unpin": "pin",
    "bind db-0 --vcpu 0 --cpus 4 --dry-run": "bind",
    "pools": "pools",
    "alloc explain CONTAINER": "alloc-explain",
    "alloc what-if --cpus 1 --policy static": "what-if",
    "alloc compare CHECKPOINT": "alloc-compare",
    "policy get": "policy",
    "metrics": "error",  # the settings of this test serve none
    "config show": "config",
    "config check": "config-check",
    "install --root ROOT": "install",
    "uninstall --root ROOT": "install",
    "show no-such-pod": "error",
}
"""Commands, and the document that each prints."""

NOT_PRINTED = {"names", "watch", "findings", "metrics"}
"""Documents of the daemon's protocol, and one that a command makes of the daemon's metrics."""


def schema_of(kind: str) -> Any:
    """Return the published schema of a kind."""
    return json.loads((DOCS / "schema" / f"{kind}.json").read_text())


def wrong(document: Any, schema: Any) -> list[str]:
    """Return what of a document does not fit a schema."""
    return list(violations(document, schema, schema))


@pytest.fixture
def config(serve: Serve) -> Path:
    """A daemon that answers every verb."""
    allotted = docs.allotted()
    state = replace(STATE, allocation=allotted.allocation)
    done = docs.done()
    return serve(
        {
            "state": lambda _: state,
            "explain": lambda _: docs.explained(),
            "history": lambda _: docs.changed(),
            "pin": lambda _: done,
            "unpin": lambda _: replace(done, kind="unpin"),
            "bind": lambda _: docs.bound(dry_run=True),
            "watch": lambda _: WatchDocument(
                time="", max_foreign_percent=0.1, problem="", pcpus=()
            ),
        }
    )


@pytest.mark.parametrize(("command", "kind"), COMMANDS.items(), ids=COMMANDS)
def test_each_command_prints_a_valid_document(
    command: str, kind: str, config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The document names its kind, and the schema of that kind accepts it."""
    kubelet = tmp_path / "cpu_manager_state"
    kubelet.write_text(checkpoint("0-3", {"a": {"c": "4-6"}}))
    allocation = docs.allotted().allocation
    assert allocation is not None
    grant = allocation.grants[0]
    places = {"ROOT": str(tmp_path), "CHECKPOINT": str(kubelet), "CONTAINER": grant.id}
    run([*(places.get(word, word) for word in command.split()), "--json", "--config", str(config)])
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] in {kind, command.split(maxsplit=1)[0]}, document
    assert wrong(document, schema_of(kind)) == []


def test_every_kind_of_document_is_printed_above() -> None:
    """A new kind needs a command in this test."""
    assert {*COMMANDS.values(), *NOT_PRINTED} == set(DOCUMENTS)


def test_documents_of_the_protocol() -> None:
    """Those that no command prints are valid too."""
    names = Names(sandboxes=(SandboxName("a" * 64, "shop/web"),))
    assert wrong(plain(names), schema_of("names")) == []
    assert wrong(plain(WATCH), schema_of("watch")) == []
    added = FindingRow("siren:crowded", "it has many threads", fails=True).found("a", "4", "many")
    findings = plain(Findings(findings=(added,)))
    assert wrong(findings, schema_of("findings")) == []
    findings["findings"][0]["kind"] = "crowded"
    assert wrong(findings, schema_of("findings"))


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_of_a_pin(outcome: Outcome) -> None:
    """Also that of a kernel thread that cannot be moved."""
    done = docs.done()
    sandbox = done.sandboxes[0]
    result = replace(sandbox.results[0], outcome=outcome)
    made = replace(done, sandboxes=(replace(sandbox, results=(result,)),))
    assert wrong(plain(made), schema_of("pin")) == []


@pytest.mark.parametrize("verdict", get_args(CheckVerdict))
def test_every_verdict_of_a_check(verdict: str) -> None:
    """As `check` comes to them: all well, something found, nothing known."""
    made = {
        "ok": check(docs.state(), [], intruders_fail=True),
        "findings": check(docs.state(docs.drifted()), [], intruders_fail=True),
        "unknown": docs.not_checked(),
    }[verdict]
    assert made.verdict == verdict
    assert wrong(plain(made), schema_of("check")) == []


def lists_of(schema: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield each list of values of a schema with a copy of it, to be changed and put back."""
    if isinstance(schema, dict):
        if "enum" in schema:
            yield schema["enum"], list(schema["enum"])
        for value in schema.values():
            yield from lists_of(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from lists_of(value)


@pytest.mark.parametrize(
    ("kind", "document", "value"),
    [
        ("check", docs.not_checked(), "unknown"),
        ("pin", docs.done(), "refused"),
        ("state", STATE, "drift"),
        ("history", docs.changed(), "reload-refused"),
        ("doctor", docs.examined(), "warn"),
    ],
)
def test_a_value_that_a_schema_lacks_is_found(kind: str, document: object, value: str) -> None:
    """These tests would see a list of values that is not whole."""
    schema = copy.deepcopy(schema_of(kind))
    for values, whole in lists_of(schema):
        values[:] = [one for one in whole if one != value]
    assert any(repr(value) in line for line in wrong(plain(document), schema))


def test_what_is_dropped_needs_another_version() -> None:
    """scripts/schema sees a field or a value that is gone, and lets go of it in a new version."""
    published, new = schema_of("check"), schema_of("check")
    assert dropped(published, new) == []
    del new["$defs"]["Finding"]["properties"]["fails"]
    new["$defs"]["CheckDocument"]["properties"]["verdict"]["enum"].remove("unknown")
    assert dropped(published, new) == ["CheckDocument.verdict 'unknown'", "Finding.fails"]
    assert dropped(new, published) == []
    new["$defs"]["CheckDocument"]["properties"]["version"]["const"] += 1
    assert dropped(published, new) == []


def test_lists_of_values_are_types_and_not_comments() -> None:
    """A comment is checked by nobody: it lacked two values that were printed."""
    for cls in DOCUMENTS.values():
        for inner in (cls, *fields_of(cls)):
            assert [text for text in comments(inner).values() if text.startswith("One of ")] == []
