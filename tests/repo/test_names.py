"""One thing, one name: no two modules define a public class of the same name.

The words are in docs/design.md, "Words".
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

DOCUMENT: Final = "the printed form of the thing of that name"
SECTION: Final = "the settings of the thing of that name"
EXCEPTIONS: Final = {
    "Candidate": DOCUMENT,
    "Container": DOCUMENT,
    "Daemon": DOCUMENT,
    "Grant": DOCUMENT,
    "Guest": SECTION,
    "History": SECTION,
    "Holder": DOCUMENT,
    "Metrics": SECTION,
    "Mount": DOCUMENT,
    "Node": DOCUMENT,
    "Note": DOCUMENT,
    "Nri": SECTION,
    "Pools": DOCUMENT,
    "Push": SECTION,
    "RanTask": DOCUMENT,
    "Refusal": DOCUMENT,
    "Row": "one row of a table: of doctor's document, of the broker's operations, and of the VMMs, "
    "which packages of others make (entry point kata_pin.vmms)",
    "Sandbox": DOCUMENT,
    "Thread": DOCUMENT,
    "Vmm": DOCUMENT,
}
"""Names that two classes may have, with the reason."""


def _classes(package: Path) -> dict[str, list[str]]:
    """Return the modules that define each public class, by its name.

    Left out are generated modules, and the class of an option: it has the option's name.
    """
    modules = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        if "_pb2" in path.name:
            continue
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            if (
                "options" not in path.relative_to(package).parts
                or node.name.lower() != path.parent.name
            ):
                modules[node.name].append(path.relative_to(package).as_posix())
    return modules


def _shared(package: Path) -> dict[str, list[str]]:
    return {name: paths for name, paths in _classes(package).items() if len(paths) > 1}


def test_each_class_has_a_name_of_its_own() -> None:
    """An exception that is no longer needed has to go too."""
    shared = _shared(ROOT / "kata_pin")
    assert {name: shared[name] for name in shared.keys() - EXCEPTIONS.keys()} == {}
    assert EXCEPTIONS.keys() - shared.keys() == set()


def test_a_second_class_of_a_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Pass: ...\nclass _Own: ...\n")
    (tmp_path / "b.py").write_text("class Pass: ...\nclass _Own: ...\nclass Other: ...\n")
    assert _shared(tmp_path) == {"Pass": ["a.py", "b.py"]}
