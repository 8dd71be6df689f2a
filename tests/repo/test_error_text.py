"""What a system call's error looks like in a text: in words, never `[Errno 24] ...`.

str() of an OSError begins with its number. So a name that an `except` clause binds, and that may be
an OSError, is not put into a text as it is: `reason_of` gives the words.
"""

from __future__ import annotations

import ast
import builtins
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kata_pin.base.errors import reason_of

PACKAGE = Path(__file__).parents[2] / "kata_pin"
EXEMPT = {
    PACKAGE / "base/errors.py",  # reason_of itself
    PACKAGE / "hook.py",  # standard library only, with words of its own
}
LOGS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def _caught(kind: ast.expr | None) -> Iterator[str]:
    """Yield the names of the exceptions that an except clause names."""
    if isinstance(kind, ast.Tuple):
        for one in kind.elts:
            yield from _caught(one)
    elif isinstance(kind, ast.Attribute):
        yield kind.attr
    elif isinstance(kind, ast.Name):
        yield kind.id


def _may_be_oserror(kind: ast.expr | None) -> bool:
    """Whether OSErrors are among these; names that are no builtins are our own errors."""
    for name in _caught(kind):
        kind = getattr(builtins, name, None)
        if name in {"SSLError", "herror", "gaierror"}:
            return True
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            continue
        if issubclass(kind, OSError) or issubclass(OSError, kind):
            return True
    return False


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _holds(node: ast.AST, name: str) -> bool:
    """Whether a value is the error: alone, or as in `error.strerror or error`."""
    if isinstance(node, ast.BoolOp):
        return any(_holds(one, name) for one in node.values)
    return _is_name(node, name)


def _texts(tree: ast.AST, name: str) -> Iterator[int]:
    """Yield the lines that turn a name into text: f-strings, str(), arguments of log calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and _holds(node.value, name):
            yield node.lineno
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        is_str = _is_name(called, "str")
        is_log = isinstance(called, ast.Attribute) and called.attr in LOGS
        if (is_str or is_log) and any(_holds(one, name) for one in node.args):
            yield node.lineno


def _bound(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield each block with a name in it that may be an OSError: except clauses, parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.name and _may_be_oserror(node.type):
            yield node, node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in (*node.args.args, *node.args.kwonlyargs):
                if argument.annotation is not None and _may_be_oserror(argument.annotation):
                    yield node, argument.arg


def _violations(path: Path) -> list[str]:
    found = {
        f"{path.relative_to(PACKAGE.parent)}:{line}: {name}"
        for block, name in _bound(ast.parse(path.read_text()))
        for line in _texts(block, name)
    }
    return sorted(found)


def test_no_text_has_an_error_number() -> None:
    """Each place that may have an OSError says it with reason_of, or with strerror."""
    files = set(PACKAGE.rglob("*.py")) - EXEMPT
    assert [one for path in files for one in _violations(path)] == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files"),
        (OSError(errno.ENOSPC, "No space left on device", "/run/x"), "/run/x: No space left on"),
        (FileNotFoundError(errno.ENOENT, "No such file", b"/run/y"), "/run/y: No such file"),
        (OSError("no room"), "no room"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("not that"), "not that"),
    ],
)
def test_words_of_errors(error: Exception, text: str) -> None:
    """Path and reason, without the number; errors of other kinds say what they say."""
    assert reason_of(error).startswith(text)
    assert "[Errno" not in reason_of(error)
