"""An option of another package: found by its entry point, in the daemon and on the command line."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.boundary.node import Node
from tests.support.addedoption import make_package


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package, on the path of this process."""
    folder = make_package(tmp_path / "packages")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [one for one in sys.modules if one.partition(".")[0] == "siren_option"]:
        del sys.modules[name]
    importlib.invalidate_caches()


async def command(package: Path, node: Node, *words: str) -> tuple[int | None, str, str]:
    """Run the real command line; return its status and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kata_pin.cli.main", *words, "--config", str(node.config)),
        env=os.environ | {"PYTHONPATH": f"{package}:{Path(__file__).parents[2]}"},
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_an_option_by_entry_point_alone(tmp_path: Path, package: Path) -> None:
    """Its section has the setting; the metric, the finding and the command follow from its row."""
    async with Node(tmp_path, siren={"most_threads": "2"}) as node:
        vm = node.vm("p1")
        await node.create(vm, "c1", "4-5", exclusive=True)
        number = len((await node.shown(vm))["threads"])
        assert number > 2

        status, out, err = await command(package, node, "check", "--for", "0s", "--json")
        assert status == 3, err
        (finding,) = (one for one in json.loads(out)["findings"] if one["kind"] == "siren:crowded")
        assert finding["fails"]
        assert finding["remedy"] == "give the VM fewer vCPUs"
        assert f"{number} threads, at most 2" in finding["text"]

        status, out, err = await command(package, node, "siren")
        assert (status, out) == (0, f"{vm.id} {number}\n"), err

        status, out, err = await command(package, node, "metrics")
        assert f"\nsiren_threads {float(number)}\n" in out, err
        assert 'kata_pin_violations{kind="siren:crowded"} 1.0\n' in out

        status, out, err = await command(package, node, "config", "show", "--running")
        assert "siren:\n  most_threads: 2  # default: 100\n  on: true\n" in out, err

        node.change(siren={"most_threads": "10000"})
        await node.ask("reload")
        assert await node.ask("findings") == {"version": 2, "kind": "findings", "findings": []}
        status, out, err = await command(package, node, "metrics")
        assert 'kata_pin_violations{kind="siren:crowded"} 0.0\n' in out, err


async def test_what_commands_say_of_it(tmp_path: Path, package: Path) -> None:
    """Its finding is a line of `check`; it has rows of `doctor`, and errors of `config check`."""
    async with Node(tmp_path, siren={"most_threads": "2"}) as node:
        vm = node.vm("p1")
        await node.create(vm, "c1", "4-5", exclusive=True)
        number = len((await node.shown(vm))["threads"])

        status, out, err = await command(package, node, "check", "--for", "0s")
        assert (status, out.startswith("FAIL: 1 siren:crowded; 1 sandbox")) == (3, True), err

        status, out, err = await command(package, node, "doctor", vm.id, "--json")
        (row,) = (one for one in json.loads(out)["rows"] if one["check"] == "siren")
        assert row["text"] == f"{number} threads, sandbox", err

        node.change(siren={"most_threads": "99"})
        status, out, err = await command(package, node, "config", "check")
        assert (status, "siren.most_threads: 99 is nothing for 0" in err) == (78, True), err


async def test_it_starts_with_a_reload_that_adds_its_section(tmp_path: Path, package: Path) -> None:
    """As our own options do; without the section nothing of it is imported."""
    async with Node(tmp_path) as node:
        await node.create(node.vm("p1"), "c1", "4-5", exclusive=True)
        assert "siren_option" not in sys.modules
        assert "no option answers" in (await node.request("option", name="siren"))["error"]
        node.change(siren="")
        await node.ask("reload")
        while not (await node.ask("option", name="siren"))["threads"]:
            await node.pause()


async def test_one_that_cannot_be_started_is_named(tmp_path: Path, package: Path) -> None:
    """A reload that adds it changes nothing else: the daemon goes on, and `reload` succeeds."""
    (package / "siren_option" / "keeper.py").write_text("def start(core):\n    return 1 // 0\n")
    async with Node(tmp_path) as node:
        node.change(siren="")
        await node.ask("reload")
        assert await node.ask("ping") == {}
        assert "no option answers" in (await node.request("option", name="siren"))["error"]
    (tmp_path / "again").mkdir()
    again = Node(tmp_path / "again", siren="")
    with pytest.raises(ExceptionGroup) as failed:
        await again.start()
    with pytest.raises(ExceptionGroup):
        await again.__aexit__(None, None, None)
    assert failed.group_contains(Exception, match="siren: the option cannot be started")


@pytest.mark.parametrize(
    ("entry", "settings", "error"),
    [
        ("siren_option:OPTION", {"most_threads": "0"}, "siren.most_threads: expected 1 to 10000"),
        ("siren_option:OPTION", {"most_threads": "13"}, "siren.most_threads: 13 brings bad luck"),
        ("siren_option:OPTION", {"most": "1"}, "siren.most: no such setting"),
        ("no_such_module:OPTION", {}, "siren: the option cannot be loaded from no_such_module"),
        ("siren_option:CROWDED", {}, "siren: siren_option:CROWDED is no option of this name"),
    ],
)
async def test_what_is_wrong_is_named(
    tmp_path: Path, entry: str, settings: dict[str, str], error: str
) -> None:
    """With its key, by `config check`, which reports everything else too."""
    node = Node(tmp_path, siren=settings, mode="sleep")
    try:
        package = make_package(tmp_path / "packages", entry)
        status, _, err = await command(package, node, "config", "check", "--file-only")
    finally:
        await node.__aexit__(None, None, None)
    assert status == 78
    assert error in err
    assert "mode: expected" in err


async def test_an_unknown_command_is_still_named(tmp_path: Path, package: Path) -> None:
    """Also beside packages, one of which cannot be loaded."""
    broken = make_package(tmp_path / "broken", "no_such_module:OPTION")
    node = Node(tmp_path)
    try:
        status, _, err = await command(broken, node, "shw")
        assert (status, "Did you mean show?" in err) == (2, True)
        status, out, _ = await command(package, node, "siren", "--help")
        assert (status, "Print the threads of each sandbox." in out) == (0, True)
    finally:
        await node.__aexit__(None, None, None)


async def test_a_check_of_doctor_that_fails_is_a_row(tmp_path: Path, package: Path) -> None:
    """The other checks are made all the same."""
    checks = package / "siren_option" / "checks.py"
    checks.write_text(
        "def prerequisites(examined):\n    raise ValueError(f'node {examined.node}')\n"
    )
    async with Node(tmp_path, siren={"most_threads": "2"}) as node:
        status, out, err = await command(package, node, "doctor", "--json")
    rows = [(one["check"], one["status"], one["text"]) for one in json.loads(out)["rows"]]
    assert status == 1, err
    assert ("doctor", "fail", "a check could not run: node True") in rows
    assert len(rows) > 10


async def test_a_task_that_fails_ends_alone(tmp_path: Path, package: Path) -> None:
    """The daemon goes on, with the option's documents: it may be of anybody."""
    keeper = package / "siren_option" / "keeper.py"
    broken = "    def tasks(self):\n        yield fail()\n\n    def passed("
    text = keeper.read_text().replace("    def passed(", broken, 1)
    keeper.write_text(f"{text}\n\nasync def fail():\n    return 1 // 0\n")
    async with Node(tmp_path, siren={"most_threads": "2"}) as node:
        vm = node.vm("p1")
        await node.create(vm, "c1", "4-5", exclusive=True)
        assert vm.id in (await node.ask("option", name="siren"))["threads"]
