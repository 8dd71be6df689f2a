"""What a daemon imports: the modules of an option only where that is on, or has to restore.

Each daemon runs in an interpreter of its own, over a host of files.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from kata_pin.base.config.options import OPTIONS

ROOMS: Final = {option.name: ".".join(option.module.split(".")[:3]) for option in OPTIONS}
"""By option the package or module that nothing else imports."""

ON: Final[dict[str, dict[str, Any]]] = {
    "allocation": {"alloc": {"policy": "annotation"}},
    "caches": {"resctrl": {"enabled": True}},
    "isolation": {"isolation": {"watch": True}},
    "memory": {"memory": "migrate"},
    "quiet": {"quiet": "irq"},
    "realtime": {"rt": {"vcpus": "fifo:1"}},
}
"""By option settings with which it is on."""

OFF: Final[dict[str, Any]] = {"isolation": {"watch": False}}
"""Settings with which every option is off."""

DEFAULT: Final = {"isolation"}
"""The options that are on without any setting."""

TUNABLE: Final = ("kind", "name", "identity", "first", "written", "previous")

LEFT: Final = {
    "allocation": (
        "CREATE TABLE alloc (number INTEGER PRIMARY KEY, state TEXT)",
        "INSERT INTO alloc VALUES (1, '{}')",
    ),
    "caches": (
        "CREATE TABLE cache_groups (sandbox_id TEXT NOT NULL, class TEXT NOT NULL)",
        "INSERT INTO cache_groups VALUES ('gone', '')",
    ),
    "quiet": (
        f"CREATE TABLE tunables ({' TEXT, '.join(TUNABLE)} TEXT)",
        "INSERT INTO tunables VALUES ('interrupt', '1', '', '', '', '')",
    ),
    "realtime": (
        "CREATE TABLE rt_threads (sandbox_id TEXT)",
        "INSERT INTO rt_threads VALUES ('gone')",
    ),
}
"""By option what a former daemon has left in the registry."""


RUN: Final = """
import asyncio, json, sqlite3, sys
from pathlib import Path
from tests.boundary.node import Node

async def run(folder, settings, *left):
    settings = json.loads(settings)
    change = settings.pop("reload", None)
    async with Node(Path(folder), **settings) as node:
        if change:
            node.change(**change)
            await node.ask("reload")
        if left:
            await node.stop()
            with sqlite3.connect(node.runtime_dir / "registry.db") as registry:
                for statement in left:
                    registry.execute(statement)
            registry.close()
            await node.start()
        print(json.dumps(sorted(sys.modules)))

asyncio.run(run(*sys.argv[1:]))
"""


def imported(folder: Path, settings: dict[str, Any], *left: str) -> set[str]:
    """Return the options of which a daemon with these settings imports anything.

    `reload` has those that it gets later. `left` are statements for its registry.
    """
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), json.dumps(settings), *left],
        cwd=Path(__file__).parents[2], capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    loaded = set(json.loads(done.stdout))
    return {name for name, room in ROOMS.items() if room in loaded}


def _restores(module: str) -> bool:
    """Whether an option gives back what it changed, so that it needs a table."""
    path = Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
    return "def give_back(" in path.read_text()


def test_every_option_is_looked_for() -> None:
    """Each row of the table has its modules, and a setting and what it leaves here."""
    names = {option.name for option in OPTIONS}
    assert names == set(ON)
    assert {option.name for option in OPTIONS if option.table} == set(LEFT)
    assert {option.name for option in OPTIONS if _restores(option.module)} == set(LEFT)
    assert all(re.fullmatch(r"kata_pin\.options\.\w+", room) for room in ROOMS.values())
    assert len(set(ROOMS.values())) == len(names)


def test_what_is_off_is_not_imported(tmp_path: Path) -> None:
    """Nothing of any option."""
    assert imported(tmp_path, OFF) == set()


def test_a_daemon_without_settings_imports_what_is_on_by_default(tmp_path: Path) -> None:
    """See DEFAULT."""
    assert imported(tmp_path, {}) == DEFAULT


@pytest.mark.parametrize("name", ON)
def test_what_is_on_is_imported(tmp_path: Path, name: str) -> None:
    """So that the tests above can fail; and nothing of other options."""
    assert imported(tmp_path, OFF | ON[name]) == {name}


@pytest.mark.parametrize("name", LEFT)
def test_what_has_to_restore_is_imported_although_it_is_off(tmp_path: Path, name: str) -> None:
    """A former daemon made a group, for example."""
    assert imported(tmp_path, OFF, *LEFT[name]) == {name}


def test_what_a_reload_switches_on_is_imported(tmp_path: Path) -> None:
    """Its sandboxes get a pass then, which it observes."""
    settings = OFF | {"reload": ON["realtime"]}
    assert imported(tmp_path, settings) == {"realtime"}
