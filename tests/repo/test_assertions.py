"""Every test can fail by what it checks, or says by its name that nothing may be raised."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PRODUCT = TESTS.parent / "kata_pin"
SAYS_SO = "raise"
CHECKS = {"raises", "warns", "fail", "timeout", "run_state_machine_as_test"}
"""Functions of others that fail a test; within asyncio's `timeout` something has to happen."""

COMMON = {name for kind in (str, bytes, list, dict, set) for name in dir(kind)}


@dataclass
class Function:
    """A function or method: what it calls by name and as a method, and whether it fails a test."""

    name: str
    asserts: bool = False
    names: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    places: set[tuple[str, str]] = field(default_factory=set)
    """Where what it calls may be defined: file and name."""

    def add(self, node: ast.AST) -> None:
        """Take in one node of its body.

        An assertion is also raising what it or `wait_for` raises, and a program that must succeed.
        """
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                self.names.add(node.func.id)
            elif isinstance(node.func, ast.Attribute):
                self.methods.add(node.func.attr)
            self.asserts |= any(
                given.arg == "check" and isinstance(given.value, ast.Constant) and given.value.value
                for given in node.keywords
            )
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            self.asserts |= ast.unparse(node.exc.func) in {"AssertionError", "TimeoutError"}
        else:
            self.asserts |= isinstance(node, ast.Assert)


def functions(tree: ast.Module) -> list[Function]:
    """Return all functions; one in another one belongs to both."""
    found: list[Function] = []

    def visit(node: ast.AST, around: tuple[Function, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            for function in around:
                function.add(child)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(Function(child.name))
                visit(child, (*around, found[-1]))
            else:
                visit(child, around)

    visit(tree, ())
    return found


def imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return where each name that a module imports from another one is defined."""
    return {
        name.asname or name.name: (f"{node.module.replace('.', '/')}.py", name.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
    }


def without_assertion(sources: dict[str, str], product: set[str]) -> list[str]:
    """Return the tests, as `file::name`, that neither assert nor call what asserts, nor say so.

    `product` are names of functions that prove nothing where they are called as a method.
    """
    trees = {file: ast.parse(source) for file, source in sources.items()}
    clear: list[tuple[str, Function]] = []
    for file, tree in trees.items():
        places = imported(tree)
        for one in functions(tree):
            called = one.names | one.methods
            one.asserts |= not CHECKS.isdisjoint(called)
            one.places = {(file, name) for name in called}
            one.places |= {places[name] for name in one.names & places.keys()}
            one.methods -= product | COMMON
            clear.append((file, one))
    checking: set[tuple[str, str]] = set()
    methods: set[str] = set()

    def can_fail(one: Function) -> bool:
        called = not checking.isdisjoint(one.places) or not methods.isdisjoint(one.methods)
        return one.asserts or called

    while more := {(file, one.name) for file, one in clear if can_fail(one)} - checking:
        checking |= more
        methods |= {name for _, name in more}
    return [
        f"{file}::{test.name}"
        for file, test in clear
        if test.name.startswith("test_") and SAYS_SO not in test.name and not can_fail(test)
    ]


def test_every_test_asserts_or_says_so() -> None:
    """What only shows that nothing is raised says so by its name."""
    sources = {
        str(file.relative_to(TESTS.parent)): file.read_text() for file in TESTS.rglob("*.py")
    }
    assert len(sources) > 300
    product = {
        name
        for file in PRODUCT.rglob("*.py")
        for name in re.findall(r"def (\w+)", file.read_text())
    }
    assert without_assertion(sources, product) == []


def test_what_counts_as_an_assertion() -> None:
    """Own assertions, those of helpers and of their helpers, and pytest's.

    A function of another file counts where it is imported from there.
    """
    source = """
from b import away, connected as made
def check(x): assert x
def settled(x): check(x)
def wait(): raise TimeoutError("late")
def idle(): print()
def run(): assert 1
def test_own(): assert 1
def test_method(): client.connect()
def test_same_file(): run()
def test_program(): subprocess.run(["x"], check=True)
def test_helper(): settled(1)
def test_waits(): wait()
def test_imported(): made(1)
def test_another_of_that_name(): away(1)
def test_pytest():
    with pytest.raises(ValueError): f()
async def test_nothing(): idle()
async def test_nothing_raises_nothing(): idle()
"""
    other = """
def connect(): assert 1
def connected(): assert 1
def away(): pass
"""
    third = "def away(): assert 1"
    found = without_assertion({"a.py": source, "b.py": other, "c.py": third}, {"connect", "run"})
    assert found == ["a.py::test_method", "a.py::test_another_of_that_name", "a.py::test_nothing"]
