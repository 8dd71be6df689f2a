"""The house: imports go down only, third parties stay in their rooms, modules stay small."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kata_pin"

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "model": {"errors"},
    "policy": {"errors", "model"},
    "wire": {"errors", "model"},
    "config": {"errors", "model"},
    "sources": {"errors", "model", "wire"},
    "vmm": {"errors", "model", "wire"},
    "host": {"errors", "model", "wire"},
    "guest": {"errors", "model", "wire"},
    "daemon": {"errors", "model", "policy", "wire", "config", "sources", "vmm", "host", "guest"},
    "cli": {
        *("errors", "model", "policy", "wire", "config", "sources", "vmm", "host", "guest"),
        "daemon",
    },
    "hook": set(),
}
"""What each station may import beside itself (docs/architecture.md)."""

THIRD_PARTIES: dict[str, set[str]] = {
    "asyncinotify": {"sources"},
    "click": {"cli"},
    "google": {"wire"},  # protobuf
    "grpc": {"sources"},  # an extra
    "prometheus_client": {"daemon"},
    "qemu": {"vmm"},
    "rich": {"cli"},
    "yaml": {"config"},
}

PURE = {"errors", "model", "policy", "wire"}
IMPURE_MODULES = {"asyncio", "subprocess", "socket", "signal", "threading", "select", "time"}

BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
MAX_LINES = 450

MODULES = sorted(PACKAGE.rglob("*.py"))


def _station(path: Path) -> str:
    """Return the folder of the package that a module belongs to, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each imported module of a file with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "kata_pin":
                for alias in node.names:
                    yield f"kata_pin.{alias.name}", node.lineno
            else:
                yield node.module, node.lineno


def _violations(path: Path) -> Iterator[str]:
    station = _station(path)
    if station == "__init__":
        return
    where = path.relative_to(ROOT)
    for name, line in _imports(path):
        top = name.split(".")[0]
        if top == "kata_pin":
            target = [*name.split("."), "__init__"][1]
            if target == station or target in {"__init__", "__version__"}:
                continue
            if target not in MAY_IMPORT[station]:
                yield f"{where}:{line}: {station} may not import {target}"
        elif top in sys.stdlib_module_names:
            if station in PURE and top in IMPURE_MODULES:
                yield f"{where}:{line}: {station} is pure and may not import {top}"
        elif station not in THIRD_PARTIES.get(top, set()):
            yield f"{where}:{line}: {top} is confined to {THIRD_PARTIES.get(top, 'nobody')}"


def test_imports_go_down_only() -> None:
    """No module imports upwards, sideways, or a third party outside its room."""
    assert [line for path in MODULES for line in _violations(path)] == []


def test_the_layer_test_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded upward import, a sideways one and a stray third party are all seen."""
    fake = tmp_path / "kata_pin"
    (fake / "host").mkdir(parents=True)
    bad = fake / "host" / "bad.py"
    bad.write_text(
        "import yaml\nfrom kata_pin.daemon import app\nfrom kata_pin.vmm.find import x\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", fake)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert len(list(_violations(bad))) == 3


def test_every_station_is_known() -> None:
    """A new folder of the package needs a place in the picture."""
    assert {_station(path) for path in MODULES} - {"__init__"} <= set(MAY_IMPORT)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_small_named_by_noun_and_explained(path: Path) -> None:
    """Each module has a docstring, a telling name, and fits in a reader's head."""
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "no module docstring"
    assert not BANNED_NAMES & {part.removesuffix(".py") for part in path.parts}
    assert len(text.splitlines()) <= MAX_LINES
