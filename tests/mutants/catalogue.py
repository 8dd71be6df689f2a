"""The mutants: one deliberate bug each, as a function's name, a text in it, and what replaces it.

They are in the TOML files beside this module. A patch names no file, so that it survives a move of
the code; it is stale if no function of that name, or more than one, has the text.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FILES: Final = tuple(sorted(Path(__file__).parent.glob("*.toml")))


class StaleError(Exception):
    """A patch does not fit the code any more."""


@dataclass(frozen=True)
class Mutant:
    """One bug: in `function` (`name` or `Class.method`), `old` becomes `new`.

    `tests` are files and folders whose tests should catch it, the nearest first.
    """

    name: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Patch:
    """A module's path below the root, and its text with the bug."""

    path: Path
    text: str


def load() -> list[Mutant]:
    """Return all mutants, in the order of the files; raises ValueError for a name used twice."""
    mutants = [one for path in FILES for one in _read(path)]
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"more than one mutant is named {', '.join(twice)}")
    return mutants


def _read(path: Path) -> Iterator[Mutant]:
    for row in tomllib.loads(path.read_text())["mutant"]:
        yield Mutant(**{**row, "tests": tuple(row["tests"])})


class Sources:
    """The modules of a package, each read and parsed once."""

    def __init__(self, root: Path = ROOT) -> None:
        self._texts = {
            path.relative_to(root): path.read_text()
            for path in sorted((root / "kata_pin").rglob("*.py"))
        }
        self._functions: dict[Path, list[tuple[str, str]]] = {}

    def patch(self, mutant: Mutant) -> Patch:
        """Return the module with the bug put in; raises StaleError."""
        fits = [
            (path, source)
            for path, text in self._texts.items()
            if mutant.old in text
            for name, source in self._functions_of(path)
            if name == mutant.function and source.count(mutant.old) == 1
        ]
        if len(fits) != 1:
            found = "no function has" if not fits else f"{len(fits)} functions have"
            raise StaleError(
                f"{mutant.name}: {found} the name {mutant.function} and the text once:"
                f" {mutant.old.strip()!r}"
            )
        path, source = fits[0]
        mutated = self._texts[path].replace(source, source.replace(mutant.old, mutant.new), 1)
        try:
            ast.parse(mutated)
        except SyntaxError as error:
            raise StaleError(f"{mutant.name}: the patched module has no valid syntax") from error
        return Patch(path, mutated)

    def _functions_of(self, path: Path) -> list[tuple[str, str]]:
        """Return each function's qualified name and source, `@` lines left out."""
        if path not in self._functions:
            lines = self._texts[path].splitlines(keepends=True)
            self._functions[path] = [
                (name, "".join(lines[node.lineno - 1 : node.end_lineno]))
                for name, node in _named(ast.parse(self._texts[path]))
            ]
        return self._functions[path]


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _named(tree: ast.Module) -> Iterator[tuple[str, _Function]]:
    for node in tree.body:
        if isinstance(node, _Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, _Function):
                    yield f"{node.name}.{member.name}", member
