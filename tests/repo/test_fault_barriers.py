"""Broad `except` clauses that swallow stand only at the fault barriers of design.md (D16)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kata_pin"

BARRIERS = {
    "engine/sandboxes.py": ["_one_pass"],
    "guest/keeper.py": ["attempt"],
    "engine/runner.py": ["_notify", "_read_wanted"],
    "service/audits.py": ["_all_of"],
    "options/quiet/keeper.py": ["_run"],
    "options/memory/keeper.py": ["_settle"],
    "records/hooks.py": ["_serve_one"],
    "peers/nri/session.py": ["_adopted", "_decide", "data_received"],
    "linux/sockets.py": ["_client"],
    "follow/files.py": ["left_to_audits"],
    "options/allocation/push.py": ["run"],
    "records/history.py": ["emit"],
    "options/allocation/checked_policy.py": ["_asked", "_third", "make_policy"],
    "vmm/kinds.py": ["_third"],
    "base/config/options.py": ["announced"],
    "cli/doctor/node.py": ["_guarded"],
    "cli/commands/config.py": ["_of_option"],
    "service/options.py": ["_decided", "_started", "give_back", "guarded"],
    "cli/session.py": ["ended"],
    "hook.py": ["main"],
}
"""The functions that may swallow any error, by module; each module is named in design.md, D16."""

_BROAD = {"Exception", "BaseException"}
_SUPPRESSED = {f"{name}({one})" for name in ("suppress", "contextlib.suppress") for one in _BROAD}


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(one is None or (isinstance(one, ast.Name) and one.id in _BROAD) for one in kinds)


def _swallowing(tree: ast.AST, function: str = "") -> Iterator[str]:
    """Yield the function of each clause that takes any error and does not raise it again."""
    for node in ast.iter_child_nodes(tree):
        inside = function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = node.name
        elif isinstance(node, ast.ExceptHandler) and _is_broad(node):
            if ast.unparse(node.body[-1]) != "raise":
                yield inside
        elif isinstance(node, ast.Call) and ast.unparse(node) in _SUPPRESSED:
            yield inside
        yield from _swallowing(node, inside)


def test_broad_excepts_are_fault_barriers() -> None:
    """Every place that swallows any error is in the list, and nothing else is."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        functions = sorted(set(_swallowing(ast.parse(path.read_text()))))
        if functions:
            where = path.relative_to(PACKAGE).as_posix()
            name = next((one for one in BARRIERS if f"kata_pin/{where}".endswith(one)), where)
            found[name] = functions
    assert found == BARRIERS


def test_the_barriers_are_named_in_the_design() -> None:
    """D16 names each module that has one."""
    text = (ROOT / "docs" / "design.md").read_text()
    section = text.split("## D16", 1)[1].split("\n## ", 1)[0]
    assert [one for one in BARRIERS if f"`{one}`" not in section] == []


def test_the_search_can_fail() -> None:
    """A clause that swallows and a broad suppress are seen; one that raises again is not."""
    text = """
def a():
    try:
        x()
    except (OSError, Exception):
        pass
async def b():
    with contextlib.suppress(Exception):
        x()
def c():
    try:
        x()
    except BaseException:
        y()
        raise
"""
    assert list(_swallowing(ast.parse(text))) == ["a", "b"]
