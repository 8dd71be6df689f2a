"""An option of another package: found by its entry point, in the daemon and on the command line."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
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
    for name in [one for one in sys.modules if one.partition(".")[0].endswith("_option")]:
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


def add_method(package: Path, method: str, *, name: str = "siren") -> None:
    """Add a method to the option of a package."""
    keeper = package / f"{name}_option" / "keeper.py"
    text = keeper.read_text()
    keeper.write_text(text.replace("    def passed(", f"    {method}\n\n    def passed(", 1))


async def fails_to_start(node: Node, error: str) -> None:
    """Start a daemon, which ends with an error."""
    with pytest.raises(ExceptionGroup) as failed:
        await node.start()
    with pytest.raises(ExceptionGroup):
        await node.__aexit__(None, None, None)
    assert failed.group_contains(Exception, match=error)


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
    await fails_to_start(again, "siren: the option cannot be started")


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
    assert ("doctor", "fail", "a check of option siren could not run: node True") in rows
    assert len(rows) > 10


async def test_a_config_check_that_fails_is_a_problem(tmp_path: Path, package: Path) -> None:
    """It is named after the option; what else is wrong is found all the same."""
    checks = package / "siren_option" / "checks.py"
    checks.write_text("def problems(config, topology):\n    raise ValueError('no siren')\n")
    node = Node(tmp_path, siren={}, housekeeping="8000")
    try:
        status, _, err = await command(package, node, "config", "check")
    finally:
        await node.__aexit__(None, None, None)
    assert status == 78
    assert "siren: its check could not run: no siren" in err
    assert "the node has no CPU 8000" in err


async def test_a_task_that_fails_ends_alone(tmp_path: Path, package: Path) -> None:
    """The daemon goes on, with the option's documents: it may be of anybody."""
    add_method(package, "def tasks(self):\n        yield fail()")
    with (package / "siren_option" / "keeper.py").open("a") as keeper:
        keeper.write("\n\nasync def fail():\n    return 1 // 0\n")
    async with Node(tmp_path, siren={"most_threads": "2"}) as node:
        vm = node.vm("p1")
        await node.create(vm, "c1", "4-5", exclusive=True)
        assert vm.id in (await node.ask("option", name="siren"))["threads"]


@pytest.mark.parametrize(
    ("answer", "failed"),
    [
        ("1 // 0", "integer division or modulo by zero"),
        ("{'loud': ()}", "Unexpected keyword argument 'loud'"),
        ("{'quiet_kept': (1,)}", "Expected `str`, got `int` - at `$.quiet_kept[0]`"),
        ("{'quiet_kept': ('asked the siren',)}", ""),
    ],
)
async def test_one_that_cannot_restore_keeps_no_other_from_it(
    tmp_path: Path, package: Path, answer: str, failed: str
) -> None:
    """Each has its turn, and then the threads; the one that failed is named."""
    make_package(package, name="horn")
    add_method(package, f"async def give_back(self, ids):\n        return {answer}")
    kept = 'return {"quiet_kept": ("asked the horn",)}'
    add_method(package, f"async def give_back(self, ids):\n        {kept}", name="horn")
    async with Node(tmp_path, siren={}, horn={}) as node:
        vm = node.vm("p1")
        first = vm.masks
        await node.create(vm, "c1", "4-5", exclusive=True)
        assert vm.masks != first
        done = await node.ask("release")
        assert done["options_failed"] == ([f"option siren: {failed}"] if failed else [])
        asked = [] if failed else ["asked the siren"]
        assert sorted(done["quiet_kept"]) == ["asked the horn", *asked]
        assert vm.masks == first


async def test_what_it_could_not_restore_has_the_documents_fields_alone(
    tmp_path: Path, package: Path
) -> None:
    """It may answer with plain values; what is unknown in them is in no document."""
    kept = {"id": "c1", "pod": "shop/db", "name": "app", "cpus": "4-5"}
    answer = {"cpusets_kept": [{**kept, "loud": True}]}
    add_method(package, f"async def give_back(self, ids):\n        return {answer}")
    async with Node(tmp_path, siren={}) as node:
        done = await node.ask("release")
        assert (done["cpusets_kept"], done["options_failed"]) == ([kept], [])


@pytest.mark.parametrize(("granted", "expected"), [("1 // 0", {"4", "5"}), ("given", {"6"})])
async def test_one_that_cannot_decide_fails_no_pass(
    tmp_path: Path,
    package: Path,
    caplog: pytest.LogCaptureFixture,
    granted: str,
    expected: set[str],
) -> None:
    """What it decided before holds if it can tell that, else what is recorded; both name it."""
    add_method(package, "def allot(self, containers):\n        return 1 // 0")
    add_method(
        package,
        "def granted(self, containers):\n"
        "        from msgspec.structs import replace\n"
        "        from kata_pin.base.cpuset import CpuSet\n"
        "        from kata_pin.placement.masks import Allotment\n"
        "        given = tuple(replace(one, cpus=CpuSet.parse('6')) for one in containers)\n"
        f"        return Allotment({granted})",
    )
    async with Node(tmp_path, siren={}) as node:
        vm = node.vm("p1")
        await node.create(vm, "c1", "4-5", exclusive=True)
        assert {vm.masks["v0"], vm.masks["v1"]} == expected
        await node.ask("reconcile")
        shown = await node.shown(vm)
        (note, *_) = (one for one in shown["notes"] if one["code"] == "option-failed")
        assert "option siren failed in allot" in note["text"]
        logged = [one for one in caplog.messages if "option siren failed in allot" in one]
        assert len(logged) == 1, "for the same reason only once"
        _, out, err = await command(package, node, "doctor", vm.id)
        assert "option siren failed in allot" in " ".join(out.split()), err


async def test_two_options_with_one_name(tmp_path: Path, package: Path) -> None:
    """The configuration is refused, whether both are of packages, which the error names, or not."""
    make_package(package, name="horn", option="siren")
    make_package(package, name="caches")
    node = Node(tmp_path, siren={}, caches={})
    try:
        status, _, err = await command(package, node, "config", "check", "--file-only")
    finally:
        await node.__aexit__(None, None, None)
    assert status == 78
    assert re.search("siren: the packages (horn and siren|siren and horn) both have", err), err
    assert "caches: kata-pin has an option of this name itself" in err


async def test_two_options_with_one_verb(tmp_path: Path, package: Path) -> None:
    """Neither answers in place of the other: the daemon names both, and does not start."""
    make_package(package, name="horn")
    keeper = package / "horn_option" / "keeper.py"
    keeper.write_text(keeper.read_text().replace('return {"horn":', 'return {"siren":'))
    await fails_to_start(
        Node(tmp_path, siren={}, horn={}), "horn: its verb 'siren' is one of option siren"
    )


async def test_two_options_with_one_metric(tmp_path: Path, package: Path) -> None:
    """A scrape with both would be refused whole: the later one is left out, and both are named."""
    make_package(package, name="horn")
    keeper = package / "horn_option" / "keeper.py"
    text = keeper.read_text().replace('"horn_threads"', '"siren_threads"')
    again = text.replace(
        "METRICS = (", 'METRICS = (MetricRow("kata_pin_sandboxes", "Ours.", len), '
    )
    keeper.write_text(again)
    async with Node(tmp_path, siren={}, horn={}) as node:
        status, out, _ = await command(package, node, "metrics")
        assert (status, out.count("\nsiren_threads "), out.count("\nkata_pin_sandboxes ")) == (
            0,
            1,
            1,
        )
        notes = [one["text"] for one in (await node.ask("state"))["notes"]]
        assert (
            "metric siren_threads of option horn is not shown: option siren has one of that name"
            in notes
        )
        assert (
            "metric kata_pin_sandboxes of option horn is not shown: kata-pin has one of that name"
            in notes
        )


async def test_two_options_with_one_command(tmp_path: Path, package: Path) -> None:
    """Neither runs in place of the other; one that is ours is named by `config check`."""
    make_package(package, name="horn")
    row = package / "horn_option" / "__init__.py"
    text = row.read_text()
    row.write_text(text.replace('commands={"horn"', 'commands={"siren"'))
    node = Node(tmp_path, horn={})
    try:
        status, _, err = await command(package, node, "siren")
        assert (status, "the options horn and siren both have the command siren" in err) == (
            78,
            True,
        )
        row.write_text(text.replace('commands={"horn"', 'commands={"show"'))
        status, _, err = await command(package, node, "config", "check", "--file-only")
        assert (status, "horn: its command show is one of kata-pin's own" in err) == (78, True)
    finally:
        await node.__aexit__(None, None, None)
