"""The house: imports go down only, third parties stay in their rooms, modules stay small."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kata_pin"

ORDER = (
    "hook", "rights/broker", "base", "rights", "linux", "peers", "vmm", "placement", "records",
    "engine", "follow", "guest", "service", "cli",
)  # fmt: skip
"""The rooms of the core: each may import those before it (docs/architecture.md).

A room of options/ may import all of these, and no other option; the core imports no option.
"""

ALONE = {"hook", "rights/broker"}
"""Standard library only, and nothing of the package but their own."""

FOLDERS: dict[str, dict[str, set[str]]] = {
    "base": {
        "": set(),
        "config": {"", "documents"},
        "documents": {""},
    },
    "peers": {
        "": {"nri", "proto"},
        "agent": {"", "proto"},
        "kubelet": {"", "proto"},
        "nri": {"", "proto"},
        "proto": set(),
    },
    "cli": {
        "": {"render", "reports"},
        "commands": {"", "doctor", "node", "render", "reports"},
        "doctor": {"node", "reports"},
        "node": set(),
        "render": {"reports"},
        "reports": set(),
        "assets": set(),
        "documents": set(),
    },
}
"""What each folder of a room may import of the others; "" are the room's own modules.

A room's own modules are at the bottom, but for cli: there they are at the top.
"""

THIRD_PARTIES: dict[str, set[str]] = {
    "asyncinotify": {"follow", "linux", "options", "records"},
    "click": {"cli", "options"},
    "google": {"peers"},
    "grpc": {"peers"},
    "msgspec": set(ORDER) - ALONE | {"options"},
    "prometheus_client": {"service"},
    "psutil": {"cli"},
    "pyroute2": {"linux"},
    "qemu": {"rights"},
    "rich": {"cli", "options"},
    "yaml": {"service"},
}
"""The rooms of each third party; `options` are all options."""

PURE = {"base", "placement"}
CODECS = {
    "guest/map.py",
    "linux/proc.py",
    "options/allocation/accumulator.py",
    "options/allocation/choice.py",
    "options/allocation/demand.py",
    "options/allocation/policies.py",
    "options/allocation/policy.py",
    "options/allocation/pooled.py",
    "options/allocation/shared_pool.py",
    "options/cluster/decide.py",
    "options/quiet/decide.py",
    "options/quiet/findings.py",
    "peers/agent/messages.py",
    "peers/containerd.py",
    "peers/nri/messages.py",
    "peers/nri/replies.py",
    "peers/oci.py",
    "peers/qemu.py",
    "peers/ttrpc.py",
    "peers/vmm_cmdline.py",
}
"""Modules of other rooms that are pure functions too."""

IMPURE_MODULES = {"asyncio", "subprocess", "socket", "signal", "threading", "select", "time"}

BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
MAX_LINES = 600
MAX_FUNCTION = 60
LONG_FUNCTIONS = {
    "service/assembly.py: __init__",
    "engine/passes.py: _observe_and_act",
}
"""Functions above the limit, each a list of steps in order: a start and a pass."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def _room(parts: tuple[str, ...]) -> str:
    """Return the room of a module, whose names below the package are `parts`."""
    folders = 2 if parts[0] == "options" or parts[:2] == ("rights", "broker") else 1
    return "/".join(parts[:folders]).removesuffix(".py")


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
                is_module = (
                    node.module.split(".")[0] == "kata_pin"
                    and folder.is_dir()
                    and ((folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir())
                )
                yield f"{node.module}.{alias.name}" if is_module else node.module, node.lineno


def _sideways(path: Path) -> Iterator[str]:
    """Yield the imports of a module that go up or sideways between the folders of its room."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    room = parts[0]
    if room not in FOLDERS or parts[-1] == "__init__":
        return
    folders = FOLDERS[room]
    folder = parts[1] if len(parts) > 2 and parts[1] in folders else ""
    for name, _ in _imports(path):
        target = name.split(".")[1:]
        if name.split(".")[0] != "kata_pin" or target[:1] != [room]:
            continue
        other = target[1] if len(target) > 1 and target[1] in folders else ""
        if other not in {folder, *folders[folder]}:
            yield f"{'.'.join(parts)} -> {'.'.join(target)}"


def _circles() -> list[list[str]]:
    """Return the groups of modules that import each other in circles."""
    names = {
        ".".join(("kata_pin", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {
        name: {target for target, _ in _imports(path) if target in names}
        for name, path in names.items()
    }
    while leaves := {name for name, targets in graph.items() if not targets}:
        graph = {name: targets - leaves for name, targets in graph.items() if name not in leaves}
    return sorted([name, *sorted(targets)] for name, targets in graph.items())


def _may_import(room: str, other: str) -> bool:
    """Whether the modules of a room may import those of another."""
    if other.startswith("options") or room in ALONE:
        return False
    return room.startswith("options") or ORDER.index(other) < ORDER.index(room)


def _is_pure(path: Path) -> bool:
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] in PURE or inside.as_posix() in CODECS


def _violations(path: Path) -> Iterator[str]:
    """Yield the imports that no rule allows."""
    inside = path.relative_to(PACKAGE)
    if inside.parts == ("__init__.py",):
        return
    room = _room(inside.parts)
    for name, line in _imports(path):
        place, top = f"{path.relative_to(ROOT)}:{line}", name.split(".")[0]
        if top == "kata_pin":
            target = tuple(name.split(".")[1:])
            if not target or target[0] == "__version__":
                continue
            other = _room(target)
            if other != room and not _may_import(room, other):
                yield f"{place}: {room} may not import {other}"
        elif top in sys.stdlib_module_names:
            if top in IMPURE_MODULES and _is_pure(path):
                yield f"{place}: is pure and may not import {top}"
        elif (
            not {room, room.split("/", maxsplit=1)[0]} & THIRD_PARTIES.get(top, set())
            or room in ALONE
        ):
            yield f"{place}: {top} is confined to {THIRD_PARTIES.get(top, 'no room')}"


def test_imports_go_down_only() -> None:
    """No module imports upwards, sideways, an option, or a third party outside its room."""
    assert [line for path in MODULES for line in _violations(path)] == []


def test_the_layer_test_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upward import, an option and a stray third party are all seen."""
    fake = tmp_path / "kata_pin"
    (fake / "linux").mkdir(parents=True)
    bad = fake / "linux" / "bad.py"
    bad.write_text(
        "import yaml\nfrom kata_pin.service import app\n"
        "from kata_pin.options.quiet.keeper import x\n"
    )
    other = fake / "options" / "caches" / "bad.py"
    other.parent.mkdir(parents=True)
    other.write_text("import kata_pin.options.quiet.keeper\nimport kata_pin.service.app\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", fake)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert len(list(_violations(bad))) == 3
    assert len(list(_violations(other))) == 1


def test_rooms_have_one_direction() -> None:
    """Inside a room folders import down only."""
    assert {line for path in MODULES for line in _sideways(path)} == set()


def test_no_modules_import_each_other_in_circles() -> None:
    """Each module can be read after those that it imports."""
    assert _circles() == []


def test_the_tests_of_rooms_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upward import, a sideways one and a circle are all seen; one downwards is none."""
    fake = tmp_path / "kata_pin"
    for folder in ("cli/render", "cli/node", "cli/commands"):
        (fake / folder).mkdir(parents=True)
    up = fake / "cli" / "node" / "a.py"
    up.write_text("from kata_pin.cli.commands import app\n")
    (fake / "cli" / "commands" / "app.py").write_text("from kata_pin.cli.render.d import y\n")
    (fake / "cli" / "render" / "d.py").write_text("import kata_pin.cli.node.a\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", fake)
    assert list(_sideways(up)) == ["cli.node.a -> cli.commands.app"]
    assert list(_sideways(fake / "cli" / "render" / "d.py")) == ["cli.render.d -> cli.node.a"]
    assert list(_sideways(fake / "cli" / "commands" / "app.py")) == []
    assert len(_circles()) == 3


def _used() -> set[str]:
    """Return the modules that others import, or name as `module:function` or `module`."""
    used = set()
    for path in MODULES:
        used |= {name for name, _ in _imports(path)}
        texts = re.findall(r'"(?:kata_pin\.)?([a-z]\w*(?:\.\w+)+)(?::\w+)?"', path.read_text())
        used |= {f"kata_pin.{text}" for text in texts}
    return used


def test_every_module_is_used() -> None:
    """So nobody forgot to start what a new one has. The program itself is imported by none."""
    names = {
        ".".join(("kata_pin", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in MODULES
        if not path.name.startswith("__")
    }
    assert names - _used() == {"kata_pin.cli.entry"}


def test_every_room_is_known() -> None:
    """A new folder of the package needs a place in the picture, and in the map."""
    rooms = {_room(path.relative_to(PACKAGE).parts) for path in MODULES}
    page = (ROOT / "docs/architecture.md").read_text()
    assert {room for room in rooms if f"`{room}" not in page} == {"__init__", "options/__init__"}
    core = {room for room in rooms if not room.startswith("options")}
    assert core - {"__init__"} == set(ORDER)
    for room, folders in FOLDERS.items():
        found = {path.name for path in (PACKAGE / room).iterdir() if path.is_dir()}
        assert found - {"__pycache__"} == set(folders) - {""}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_small_named_by_noun_and_explained(path: Path) -> None:
    """Each module has a docstring, a telling name, and fits in a reader's head."""
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "no module docstring"
    assert not BANNED_NAMES & {part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts}
    assert len(text.splitlines()) <= MAX_LINES
    long = {
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION
    }
    assert long <= LONG_FUNCTIONS
