"""Every function that reads bytes of others has a fuzz target."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kata_pin"

WRITES = ("encode_", "dump_", "render_")
WRITES_TOO = ("_request", "_reply")
"""Beginnings and ends of names of functions that make bytes and read none."""

OWN = {
    "service.protocol.encode_error",
    "peers.ttrpc.encode",
    "service.protocol.with_items",
}
"""Functions that make bytes from our own values, by other names."""


def _functions(path: Path) -> Iterator[str]:
    """Yield the public functions of a module, and its classes that are fed bytes or parse."""
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield f"{module}.{node.name}"
        elif isinstance(node, ast.ClassDef):
            methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            if methods & {"feed", "parse"}:
                yield f"{module}.{node.name}"


def _taking_bytes(path: Path) -> set[str]:
    """Return the functions of a module whose first parameter is bytes."""
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        if node.args.args
        and ast.unparse(node.args.args[0].annotation or node.args.args[0]) == "bytes"
    }


def _wanted() -> set[str]:
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE).parts
        if inside[0] == "cli" or "proto" in inside:
            continue
        for name in _functions(path):
            last = name.rpartition(".")[2]
            reads = last.startswith("parse") or last[0].isupper()
            reads |= inside[0] == "peers" and last in _taking_bytes(path)
            if reads and not last.startswith(WRITES) and not last.endswith(WRITES_TOO):
                found.add(name)
    return found - OWN


def test_every_parser_has_a_target() -> None:
    """A new parser needs a line in tests/chaos/fuzz/targets.py."""
    covered = {name.removeprefix("kata_pin.") for one in TARGETS.values() for name in one.covers}
    assert sorted(_wanted() - covered) == [], "no fuzz target runs these"


def test_targets_name_what_exists() -> None:
    """A function that was renamed or removed is not covered by its old name."""
    names = {name for one in TARGETS.values() for name in one.covers}
    missing = [name for name in sorted(names) if not _exists(name)]
    assert missing == []


def _exists(name: str) -> bool:
    module, _, last = name.rpartition(".")
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    if not path.is_file():
        return False
    body = ast.parse(path.read_text()).body
    return any(
        isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last for node in body
    )
