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
    """A function or method: what it calls, and whether it can itself fail a test."""

    name: str
    asserts: bool = False
    calls: set[str] = field(default_factory=set)

    def add(self, node: ast.AST) -> None:
        """Take in one node of its body.

        An assertion is also raising what it or `wait_for` raises, and a program that must succeed.
        """
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name | ast.Attribute):
                self.calls.add(called.id if isinstance(called, ast.Name) else called.attr)
            self.asserts |= any(
                given.arg == "check" and isinstance(given.value, ast.Constant) and given.value.value
                for given in node.keywords
            )
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            self.asserts |= ast.unparse(node.exc.func) in {"AssertionError", "TimeoutError"}
        else:
            self.asserts |= isinstance(node, ast.Assert)


def functions(source: str) -> list[Function]:
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

    visit(ast.parse(source), ())
    return found


def without_assertion(sources: dict[str, str], product: set[str]) -> list[str]:
    """Return the tests, as `file::name`, that neither assert nor call what asserts, nor say so.

    `product` are names of functions that prove nothing where they are called as a method.
    """
    files = {file: functions(source) for file, source in sources.items()}
    clear = [one for found in files.values() for one in found if one.name not in product | COMMON]
    checking = CHECKS | {function.name for function in clear if function.asserts}
    while more := {one.name for one in clear if one.calls & checking} - checking:
        checking |= more

    def can_fail(function: Function) -> bool:
        return function.asserts or bool(function.calls & checking)

    return [
        f"{file}::{test.name}"
        for file, found in sorted(files.items())
        for test in found
        if test.name.startswith("test_") and SAYS_SO not in test.name
        if not can_fail(test) and not test.calls & {one.name for one in found if can_fail(one)}
    ]


def test_every_test_asserts_or_says_so() -> None:
    """What only shows that nothing is raised says so by its name."""
    sources = {str(file.relative_to(TESTS)): file.read_text() for file in TESTS.rglob("*.py")}
    assert len(sources) > 300
    product = {
        name
        for file in PRODUCT.rglob("*.py")
        for name in re.findall(r"def (\w+)", file.read_text())
    }
    assert without_assertion(sources, product) == []


def test_what_counts_as_an_assertion() -> None:
    """Own assertions, those of helpers and of their helpers, and pytest's."""
    source = """
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
def test_pytest():
    with pytest.raises(ValueError): f()
async def test_nothing(): idle()
async def test_nothing_raises_nothing(): idle()
"""
    other = "def connect(): assert 1"
    found = without_assertion({"a.py": source, "b.py": other}, {"connect", "run"})
    assert found == ["a.py::test_method", "a.py::test_nothing"]
