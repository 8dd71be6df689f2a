"""Each setting is read by something."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from kata_pin.base.config.table import BY_KEY, SECTIONS

PACKAGE: Final = Path(__file__).resolve().parents[2] / "kata_pin"

CLASSES: Final = {"": "Config"} | {key: cls.__name__ for key, cls in SECTIONS.items()}
"""By section the class of its settings."""


def last_name(node: ast.AST | None) -> str:
    """Return the last name of `a`, `a.b` and `self._b()`, without underscores before it."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr.lstrip("_")
    return node.id.lstrip("_") if isinstance(node, ast.Name) else ""


def typed(node: ast.AST) -> tuple[str, ast.expr | None]:
    """Return the name of an argument, a variable or a function, and its type."""
    if isinstance(node, ast.arg):
        return node.arg.lstrip("_"), node.annotation
    if isinstance(node, ast.AnnAssign):
        return last_name(node.target), node.annotation
    return (node.name, node.returns) if isinstance(node, ast.FunctionDef) else ("", None)


def names(tree: ast.AST) -> dict[str, set[str]]:
    """Return by name the sections that it stands for: what is assigned to it, or its type."""
    found: dict[str, set[str]] = {key: {key} for key in SECTIONS}
    found |= {"config": {""}, "now": {""}}
    classes = {alias.asname or alias.name: alias.name for node in ast.walk(tree)
               if isinstance(node, ast.ImportFrom) for alias in node.names}  # fmt: skip

    def add(target: ast.AST, value: ast.AST | None) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                add(one, its)
        elif sections := found.get(last_name(value)):
            found.setdefault(last_name(target), set()).update(sections)

    for node in ast.walk(tree):
        name, annotation = typed(node)
        types = {last_name(part) for part in ast.walk(annotation)} if annotation else set()
        named = {classes.get(one, one) for one in types}
        if sections := {key for key, cls in CLASSES.items() if cls in named}:
            found.setdefault(name, set()).update(sections)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                add(target, node.value)
    return found


def read(tree: ast.AST) -> Iterator[str]:
    """Yield the keys that a module reads."""
    known = names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in CLASSES.values():
            (section,) = (key for key, name in CLASSES.items() if name == node.name)
            yield from read_of(node, {"self": {section}})
    yield from read_of(tree, known)


def read_of(tree: ast.AST, known: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the keys that are attributes of what has these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            for section in known.get(last_name(node.value), ()):
                yield f"{section}.{node.attr}" if section else node.attr


def unread(trees: list[ast.AST]) -> set[str]:
    """Return the settings that no module reads."""
    return BY_KEY.keys() - {key for tree in trees for key in read(tree)}


TREES: Final[list[ast.AST]] = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]


def test_every_setting_is_read() -> None:
    """By the name of its section, or of what has the section's type."""
    assert unread(TREES) == set()


def test_a_setting_that_nobody_reads_is_seen() -> None:
    """Another thing's attribute of that name does not count, nor does another section's."""
    module = """
from kata_pin.base.config.tree import Guest as GuestSettings

class Probe:
    def __init__(self, settings: Callable[[], GuestSettings], other: Other) -> None:
        self._settings = settings
        other.enabled

    def ask(self, config: Config) -> None:
        now, limits = self._settings(), config.isolation
        return now.connect_ms, limits.check_s, config.qmp.greeting_ms, config.mode, limits.cpus
"""
    found = BY_KEY.keys() - unread([ast.parse(module)])
    assert found == {"guest.connect_ms", "isolation.check_s", "qmp.greeting_ms", "mode"}
