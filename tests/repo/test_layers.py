"""The house: imports go down only, third parties stay in their rooms, modules stay small."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from functools import cache
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
    "remedy": set(),
    "broker": set(),
    "calls": {"errors", "broker"},
    "owned_file": {"errors", "broker", "calls"},
    "sources": {"errors", "remedy", "broker", "calls", "model", "wire", "owned_file"},
    "vmm": {"errors", "calls", "model", "wire", "owned_file"},
    "host": {"errors", "broker", "calls", "model", "wire"},
    "guest": {"errors", "calls", "model", "wire"},
    "daemon": {
        *("errors", "remedy", "broker", "calls", "owned_file", "model", "policy", "wire"),
        "config",
        *("sources", "vmm", "host", "guest", "hook"),
    },
    "reporter": {"errors", "owned_file", "model", "policy", "wire", "sources"},
    "cli": {
        *("errors", "remedy", "model", "policy", "wire", "config", "sources", "vmm", "host"),
        *("guest", "daemon", "hook", "reporter"),
    },
    "hook": set(),
}
"""What each station may import beside itself (docs/architecture.md)."""

ROOMS: dict[str, dict[str, set[str]]] = {
    "policy": {
        "": set(),
        "placement": set(),
        "guest": {"placement"},
        "alloc": {"placement"},
        "isolation": {"placement"},
        "quiet": set(),
        "explain": {"placement", "guest"},
    },
    "wire": {
        "": {"proto"},
        "proto": set(),
        "guest": {"", "proto"},
        "kata": {"", "proto"},
        "kernel": {"", "proto"},
        "kube": {"", "proto", "nri"},  # the CRI's updates carry the cpusets that NRI's do
        "nri": {"", "proto"},
        "qemu": {"", "proto"},
    },
    "daemon": {
        "": set(),
        "store": {""},
        "reconcile": {"", "store"},
        "intake": {"", "store", "reconcile"},
        "guests": {"", "store", "reconcile"},
        "allocation": {"", "store", "reconcile"},
        "isolation": {"", "store", "reconcile"},
        "quiet": {"", "store", "reconcile"},
        "status": {
            "",
            "store",
            "reconcile",
            "intake",
            "guests",
            "allocation",
            "isolation",
            "quiet",
        },
        "service": {
            *("", "store", "reconcile", "intake", "guests", "allocation", "isolation", "quiet"),
            "status",
        },
    },
    "cli": {
        "": {"commands", "render", "reports", "node"},
        "commands": {"", "render", "reports", "node"},
        "render": {"reports"},
        "reports": {"node"},
        "node": set(),
        "assets": set(),
        "documents": set(),
    },
}
"""What each folder of a station may import of the others; "" are the station's own modules.

A station's own modules are at the bottom, but for cli: there they are at the top.
"""

THIRD_PARTIES: dict[str, set[str]] = {
    "asyncinotify": {"sources"},
    "click": {"cli"},
    "google": {"wire"},  # protobuf
    "grpc": {"sources"},  # an extra
    "msgspec": {"wire"},
    "prometheus_client": {"daemon"},
    "psutil": {"cli"},
    "pyroute2": {"host"},
    "qemu": {"vmm"},
    "rich": {"cli"},
    "yaml": {"config"},
}

PURE = {"errors", "model", "policy", "wire"}
IMPURE_MODULES = {"asyncio", "subprocess", "socket", "signal", "threading", "select", "time"}

BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
MAX_LINES = 400

MODULES = sorted(PACKAGE.rglob("*.py"))


def _station(path: Path) -> str:
    """Return the folder of the package that a module belongs to, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def _imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Return each module that a file imports, with its line."""
    return tuple(_named(path))


def _named(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            folder = PACKAGE.joinpath(*node.module.split(".")[1:])
            for alias in node.names:
                is_module = folder.is_dir() and node.module.split(".")[0] == "kata_pin"
                yield f"{node.module}.{alias.name}" if is_module else node.module, node.lineno


def _room(station: str, path: Sequence[str]) -> str:
    """Return the folder below a station that a module is in; `path` are its names."""
    return path[1] if len(path) > 2 and path[1] in ROOMS.get(station, {}) else ""


def _sideways(path: Path) -> Iterator[str]:
    """Yield the imports of a module that go up or sideways between the folders of its station."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    station = parts[0]
    if station not in ROOMS or parts[-1] == "__init__":
        return
    room = _room(station, parts)
    for name, _ in _imports(path):
        target = name.split(".")[1:]
        if name.split(".")[0] != "kata_pin" or target[:1] != [station]:
            continue
        other = target[1] if target[1] in ROOMS[station] else ""
        if other not in {room, *ROOMS[station][room]}:
            yield f"{'.'.join(parts)} -> {'.'.join(target)}"


def _circles() -> list[list[str]]:
    """Return the groups of modules that import each other in circles."""
    names = {
        ".".join(("kata_pin", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {
        one: {target for target, _ in _imports(path) if target in names}
        for one, path in names.items()
    }
    while leaves := {one for one, targets in graph.items() if not targets}:
        graph = {one: targets - leaves for one, targets in graph.items() if one not in leaves}
    return sorted([one, *sorted(targets)] for one, targets in graph.items())


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


def test_rooms_have_one_direction() -> None:
    """Inside a station folders import down only."""
    assert {line for path in MODULES for line in _sideways(path)} == set()


def test_no_modules_import_each_other_in_circles() -> None:
    """Each module can be read after those that it imports."""
    assert _circles() == []


def test_the_tests_of_rooms_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upward import, a sideways one and a circle are all seen; one downwards is none."""
    fake = tmp_path / "kata_pin"
    for folder in (
        "daemon/intake",
        "daemon/guests",
        "daemon/store",
        "daemon/service",
        "cli/render",
    ):
        (fake / folder).mkdir(parents=True)
    (fake / "daemon" / "store" / "a.py").write_text("from kata_pin.daemon.service import app\n")
    sideways = fake / "daemon" / "intake" / "b.py"
    sideways.write_text(
        "from kata_pin.daemon.guests import c\nfrom kata_pin.daemon.store.a import x\n"
        "from kata_pin.cli.render.d import y\n"
    )
    (fake / "cli" / "render" / "d.py").write_text("import kata_pin.daemon.intake.b\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", fake)
    assert list(_sideways(fake / "daemon" / "store" / "a.py")) == [
        "daemon.store.a -> daemon.service.app"
    ]
    assert list(_sideways(sideways)) == ["daemon.intake.b -> daemon.guests.c"]
    assert len(_circles()) == 2


def test_every_station_is_known() -> None:
    """A new folder of the package needs a place in the picture."""
    assert {_station(path) for path in MODULES} - {"__init__"} <= set(MAY_IMPORT)
    for station, rooms in ROOMS.items():
        folders = {path.name for path in (PACKAGE / station).iterdir() if path.is_dir()}
        assert folders - {"__pycache__"} == set(rooms) - {""}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_small_named_by_noun_and_explained(path: Path) -> None:
    """Each module has a docstring, a telling name, and fits in a reader's head."""
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "no module docstring"
    assert not BANNED_NAMES & {part.removesuffix(".py") for part in path.parts}
    assert len(text.splitlines()) <= MAX_LINES
