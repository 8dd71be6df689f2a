"""Tests of boundaries must outlive a redesign: they import nothing of kata_pin, but for one module.

`python -m tests.repo.test_boundary` prints how many lines of tests stand at a boundary.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FIXTURE = TESTS / "boundary/node.py"
"""The one module of tests/boundary that imports the daemon."""

IMPURE = frozenset(
    {
        *("asyncio", "concurrent", "ctypes", "fcntl", "http", "mmap", "multiprocessing", "open"),
        *("os", "pathlib", "resource", "select", "shutil", "signal", "socket", "sqlite3", "ssl"),
        *("subprocess", "tempfile", "termios", "threading", "time", "urllib"),
        *("click", "grpc", "prometheus_client", "psutil", "pyroute2", "qemu", "rich"),
    }
)
"""Modules and functions that reach sockets, files, processes, threads, clocks or terminals."""

COMPUTING = {
    "asyncio": frozenset({"Event"}),
    "os": frozenset({"fsdecode", "fsencode", "path", "sep", "strerror"}),
    "urllib": frozenset({"parse"}),
}
"""What of such a module only computes, or only holds a value."""

Use = tuple[str, str]
"""A module and a name in it; without a name the module as a whole."""


@cache
def uses(module: str) -> dict[str, set[Use]]:
    """Return what each top-level name of a module of kata_pin uses at run time."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    tree = ast.parse((path if path.exists() else path.with_suffix("") / "__init__.py").read_text())
    bound: dict[str, Use] = {}
    names: dict[str, set[tuple[str, str]]] = {}
    lazy: dict[str, set[Use]] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            bound |= {
                one.asname or one.name.partition(".")[0]: (one.name, "") for one in statement.names
            }
        elif isinstance(statement, ast.ImportFrom):
            bound |= {
                one.asname or one.name: (statement.module or "", one.name)
                for one in statement.names
            }
        else:
            read, later = set(evaluated(statement)), imported_later(statement)
            for name in defined(statement):
                names.setdefault(name, set()).update(read - {(name, "")})
                lazy.setdefault(name, set()).update(later)
    found: dict[str, set[Use]] = {name: {of} for name, of in bound.items()}
    for name, read in names.items():
        found[name] = {
            use
            for one, attribute in read
            if (use := used(module, one, attribute, bound, names)) is not None
        } | lazy[name]
    return found


def imported_later(statement: ast.stmt) -> set[Use]:
    """Return the names of kata_pin that a function or a method imports when it is called."""
    if isinstance(statement, ast.If):  # TYPE_CHECKING
        return set()
    return {
        (node.module, one.name)
        for node in ast.walk(statement)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kata_pin")
        for one in node.names
        if node.module
    }


def used(
    module: str, name: str, attribute: str, bound: dict[str, Use], own: Collection[str]
) -> Use | None:
    """Return what a name that is read stands for; of a module, the attribute that is read."""
    if name not in bound:
        return (module, name) if name in own else ("", name) if name == "open" else None
    of, inner = bound[name]
    whole = f"{of}.{inner}".rstrip(".")
    of_module = not inner or (whole.startswith("kata_pin") and is_module(whole))
    return (whole, attribute) if of_module and attribute else bound[name]


def evaluated(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that are read, each with the attribute that is read of it.

    Annotations are not: `from __future__ import annotations` leaves them unevaluated.
    """
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield node.value.id, node.attr
        return
    if isinstance(node, ast.Name):
        yield node.id, ""
    for field, value in ast.iter_fields(node):
        if field not in {"annotation", "returns"}:
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST):
                    yield from evaluated(inner)


def attributes(tree: ast.AST, name: str) -> set[str]:
    """Return the attributes of a name that are read."""
    read = (one for one in ast.walk(tree) if isinstance(one, ast.Attribute))
    return {one.attr for one in read if isinstance(one.value, ast.Name) and one.value.id == name}


def defined(statement: ast.stmt) -> set[str]:
    """Return the names that a top-level statement defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    stored = (one for one in ast.walk(statement) if isinstance(one, ast.Name))
    return {one.id for one in stored if isinstance(one.ctx, ast.Store)}


def is_pure(start: Use) -> bool:
    """Whether a name of kata_pin, and all that it uses, reaches nothing outside of memory."""
    todo, known = [start], {start}
    while todo:
        module, name = todo.pop()
        top = (module or name).partition(".")[0]
        if top in IMPURE and f"{module}.{name}".split(".")[1] not in COMPUTING.get(top, ()):
            return False
        if not module.startswith("kata_pin"):
            continue
        if is_module(f"{module}.{name}") or not name:
            module, name = f"{module}.{name}".rstrip("."), ""
        of = uses(module)
        further = set().union(*of.values()) if not name else of.get(name, set())
        todo += further - known
        known |= further
    return True


def is_module(name: str) -> bool:
    """Whether kata_pin has a module of this name."""
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(path: Path) -> set[Use]:
    """Return what a file imports, wherever in it; of a module of kata_pin, the names it reads."""
    tree = ast.parse(path.read_text())
    found: set[Use] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names = attributes(tree, alias.asname or alias.name) if is_module(whole) else set()
                found |= {(whole, name) for name in names} or {(node.module, alias.name)}
    return found


def kind_of(path: Path) -> str:
    """Return where a file of tests stands: `boundary`, `pure` or `internal`.

    A file that imports nothing of kata_pin is at a boundary: it has processes, sockets, files and
    text. One that imports only what is pure, and replaces nothing of it, tests pure functions.
    """
    own = {one for one in imports(path) if one[0].partition(".")[0] == "kata_pin"}
    if path == FIXTURE or not own - {("kata_pin", "__version__"), ("kata_pin.__version__", "")}:
        return "boundary"
    replaces = any(word in path.read_text() for word in ("SimpleNamespace", "cast(", "monkeypatch"))
    return "pure" if not replaces and all(map(is_pure, own)) else "internal"


def files() -> Iterator[Path]:
    """Yield every Python file of tests/."""
    yield from sorted(path for path in TESTS.rglob("*.py") if "__pycache__" not in path.parts)


def test_suites_at_boundaries_import_no_internals() -> None:
    """Neither the suites nor their host and runtime: what moves is imported in one place."""
    inner = [path for path in (TESTS / "boundary").glob("*.py") if path != FIXTURE]
    assert inner
    assert {path.name: kind_of(path) for path in inner} == dict.fromkeys(
        (path.name for path in inner), "boundary"
    )


def test_what_is_pure() -> None:
    """Values and decisions are; what reaches a file, a clock or a socket by any way is not."""
    assert is_pure(("kata_pin.base.cpuset", "CpuSet"))
    assert is_pure(("kata_pin.placement.place", "place"))
    assert is_pure(("kata_pin.options.pictures.page", "document")), "of a module, what it reads"
    assert is_pure(("kata_pin.options.allocation.checked_policy", "CheckedPolicy")), "annotations"
    assert not is_pure(("kata_pin.engine.sandboxes", "Supervisor")), "it waits by the clock"
    assert is_pure(("kata_pin.options.allocation.ledger", "Ledger")), "it is given the time"
    assert not is_pure(("kata_pin.linux.files", "HOST"))
    assert not is_pure(("kata_pin.guest.keeper", "Keeper"))
    assert not is_pure(("kata_pin.guest", "keeper"))


def main() -> None:
    """Print lines of test files by where they stand, and of all files below tests/."""
    lines: Counter[str] = Counter()
    every = 0
    for path in files():
        length = len(path.read_text().splitlines())
        every += length
        if path.name.startswith("test_"):
            lines[kind_of(path)] += length
    total = lines.total()
    for kind, count in lines.most_common():
        print(f"{kind:<10} {count:>7} lines  {count / total:>4.0%}")
    print(f"test files {total:>7} lines; all of tests/ {every}")


if __name__ == "__main__":
    main()
